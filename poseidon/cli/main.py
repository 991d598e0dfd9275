"""The command line: finds the command, and is the one place where errors become exit codes.

Law: a mistake of the user ends in one sentence on standard error and exit code 1 or 2, never in a
traceback. The code of a command is imported after its flags are parsed, so that help and mistakes
come at once: torch takes seconds. What a command line names is looked for before that, too.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any, TextIO

from poseidon.base.paths import own_command
from poseidon.base.settings import let_waiting_threads_sleep, name_user
from poseidon.base.text_files import visible, visible_line
from poseidon.cli.checks import check
from poseidon.cli.entry import PACKAGES, ctrl_c_ends_at_once, is_checkout, use_environment
from poseidon.cli.parsers import data, jobs, nets
from poseidon.cli.parsers.form import Command, refuse
from poseidon.errors import PoseidonError, described, limit_reached, nearest, out_of_memory
from poseidon.version import __version__
from ps_server.process_environment import collector_paused, raise_file_limit

FIRST: Mapping[str, Sequence[Command]] = {
    "Train": (nets.INIT, *jobs.STARTING),
    "Manage jobs": jobs.MANAGING,
}
"""The commands of the overview."""
TOOLS: Mapping[str, Sequence[Command]] = {
    "Hosts of a running job": jobs.HOSTS,
    "Nets, models, logs": (*jobs.TOOLS, *nets.COMMANDS),
    "Data": data.COMMANDS,
    "Shell": jobs.SHELL,
}
"""The commands of `poseidon help tools`."""
COMMANDS: Mapping[str, Command] = {
    command.name: command for commands in (*FIRST.values(), *TOOLS.values()) for command in commands
}
OTHER_NAMES: Mapping[str, str] = {
    "classification": "classify",
    "cpp_classification": "classify",
    "convert_cifar_data": "convert_cifar",
    "convert_mnist_data": "convert_mnist",
    "convert_mnist_siamese_data": "convert_mnist_siamese",
    "create_cifar10": "prepare_cifar10",
    "create_imagenet": "convert_imageset",
    "create_mnist": "convert_mnist",
    "create_mnist_siamese": "convert_mnist_siamese",
    "finetune_net": "train",
    "get_cifar10": "prepare_cifar10",
    "get_mnist": "convert_mnist",
    "make_imagenet_mean": "compute_image_mean",
    "net_speed_benchmark": "time",
    "plot_training_log": "plot",
    "prepare_mnist": "convert_mnist",
    "prepare_siamese": "convert_mnist_siamese",
    "test_net": "test",
    "train_net": "train",
}
"""Names of Caffe's tools and scripts, and names that users expect, with the commands that do the
same.
"""
_SCRIPTS = ("classify", "detect")
"""Scripts of Caffe that are not commands here, and that `poseidon python` runs."""
_TITLE = """Distributed deep learning for clusters on ordinary Ethernet.

usage: poseidon COMMAND [flags]
       poseidon COMMAND --help"""
_EXAMPLE = """example:
  poseidon train --solver=prototxt/cifar10/cifar10_quick_solver.prototxt \\
      --hostfile=machinefiles/localserver"""
_MORE = "More: poseidon help tools, the tools for nets, models, logs and data."


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of a command line; a mistake ends the process with a sentence and code 2.

    Args:
        argv: the command and its flags. The namespace has them as `argv`, in case the command has
            to start itself again.
    """
    if not argv or (argv[0].lstrip("-") in ("help", "h") and argv[1:] in ([], ["help"], ["tools"])):
        print(_overview(tools=argv[1:] == ["tools"]), end="", flush=True)
        sys.exit(0)
    if argv[0] in ("--version", "-version"):
        print(f"poseidon {__version__}", flush=True)
        sys.exit(0)
    name, *rest = argv
    if name == "help":
        name, rest = rest[0], ["--help", *rest[1:]]
    if name not in COMMANDS:
        _refuse(name, rest)
    return COMMANDS[name].parser().parse(rest)


def _overview(*, tools: bool) -> str:
    """Return the help of `poseidon` itself: each command in a line."""
    groups = TOOLS if tools else FIRST
    column = 4 + max(len(command.name) for commands in groups.values() for command in commands)
    parts = [_TITLE, *([] if tools else [_EXAMPLE])]
    for headline, commands in groups.items():
        lines = [f"  {command.name}".ljust(column) + command.line for command in commands]
        parts.append("\n".join([f"{headline}:", *lines]))
    return "\n\n".join([*parts, *([] if tools else [_MORE])]) + "\n"


def run_command(parsed: argparse.Namespace) -> int:
    """Check, import and run the command of a namespace of `parse_arguments`; return its exit
    code.
    """
    with _packages_required():
        check(parsed)
        with ctrl_c_ends_at_once(f"poseidon {parsed.command}"), collector_paused():
            module = import_module(f"poseidon.cli.{COMMANDS[parsed.command].module}")
    code: int = getattr(module, f"run_{parsed.command}")(parsed)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    _prepare_streams()
    try:
        with _visible_output():
            return _run(arguments)
    finally:
        _drop_unwritten()


def _run(arguments: Sequence[str] | None) -> int:
    if threading.current_thread() is threading.main_thread():
        # whoever started this process may ignore it, and then no child's end could be followed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    name, parsed = "poseidon", argparse.Namespace()
    try:
        parsed = parse_arguments(list(sys.argv[1:] if arguments is None else arguments))
        name = f"poseidon {parsed.command}"
        _check_current_folder()
        for note in parsed.notes:
            print(f"note: {note}", file=sys.stderr)
        let_waiting_threads_sleep()
        raise_file_limit()
        name_user()
        code = run_command(parsed)
        # what cannot be written is an error here, not one of the dying interpreter
        sys.stdout.flush()
    except PoseidonError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader is gone
        return 1
    except OSError as error:
        # what no package translates: standard output on a full disk, for example
        place = f"{error.filename}: " if error.filename is not None else ""
        sentence = (
            _problem_of_own_layers(parsed, error)
            or f"{place}{limit_reached(error) or error.strerror or error}"
        )
        print(f"{name}: {visible_line(sentence)}", file=sys.stderr)
        return 1
    except Exception as error:  # memory ran out, or a layer of the user failed
        problem = (
            out_of_memory(error) or limit_reached(error) or _problem_of_own_layers(parsed, error)
        )
        if problem is None:
            raise
        print(f"{name}: {visible_line(problem)}", file=sys.stderr)
        return 1
    return code


def _check_current_folder() -> None:
    """Refuse a current folder that is gone, before a library of torch ends the process for it."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise PoseidonError(
            "the current folder has been removed; change to one that exists"
        ) from error


def _problem_of_own_layers(parsed: argparse.Namespace, error: Exception) -> str | None:
    """Return a sentence about an exception in a module of `--import`; None for others."""
    if not getattr(parsed, "imports", ""):
        return None
    modules = import_module("poseidon.caffe.layers.registry")
    location: str = modules.location_in(parsed.imports, error)
    return f"{location}: {described(error)}" if location else None


@contextmanager
def _packages_required() -> Iterator[None]:
    """Import modules of Poseidon within the block.

    Raises:
        PoseidonError: a package that Poseidon requires is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "poseidon").partition(".")[0]
        if package in ("poseidon", "ps_server"):
            raise
        if package in PACKAGES and is_checkout():
            use_environment(package)
        raise PoseidonError(
            f"Python finds no package '{package}', which Poseidon requires, in {sys.prefix}; "
            "expected an installation with its requirements: pip install without --no-deps"
        ) from error


def _refuse(name: str, rest: Sequence[str]) -> None:
    """End the process: the first argument is not a command."""
    if name.startswith("-"):
        later = next((word for word in rest if word in COMMANDS), None)
        hint = (
            f"; flags follow the command: {own_command()} {later} {name}"
            if later
            else "; expected a command"
        )
        problem = f"unexpected {name}{hint}"
    else:
        problem = f"unknown command '{name}'" + _instead(name, rest)
    refuse("", problem)


def _instead(name: str, rest: Sequence[str]) -> str:
    """Return the part of the error that names the command to use; empty where no command is
    similar.
    """
    plain = os.path.basename(name).lower()
    for ending in (".bin", ".exe", ".py", ".sh"):
        plain = plain.removesuffix(ending)
    if plain == "caffe":
        return (
            f"; leave it out: {own_command()} {' '.join(rest)}".rstrip()
            if rest
            else "; did you mean 'train'?"
        )
    plain = OTHER_NAMES.get(plain, plain)
    if plain in _SCRIPTS:
        return f": poseidon python {name if name.endswith('.py') else f'{plain}.py'} runs Caffe's script"
    near = nearest(plain, COMMANDS)
    return f"; did you mean '{near}'?" if near else ""


def _prepare_streams() -> None:
    """Give closed standard streams (`2>&-`, a daemon) the null device: a file must not get their
    descriptors.

    Standard output takes any text, such as the name of a file that is not UTF-8. Both are UTF-8 in a
    locale that knows ASCII alone.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # takes the lowest descriptor that is free, which is this one
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8")


class _VisibleStream:
    """A stream on which control characters are escapes; see `poseidon.base.text_files`.

    Attributes:
        unescaped: the stream itself, for what moves the cursor on purpose.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream

    def write(self, text: str) -> int:
        self.unescaped.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


@contextmanager
def _visible_output() -> Iterator[None]:
    """Escape what the block prints, whoever composes it."""
    before = sys.stdout, sys.stderr
    with redirect_stdout(_VisibleStream(before[0])), redirect_stderr(_VisibleStream(before[1])):
        yield


def _drop_unwritten() -> None:
    """Drop what the standard streams cannot write: the interpreter would try again at its end,
    complain, and exit with 120.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):
            setattr(sys, name, io.StringIO())
