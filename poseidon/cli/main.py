"""The command line: a registry of commands, and the one place where errors become exit codes.

Law: a mistake of the user ends in one sentence on standard error and exit code 1 or 2, never in a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import io
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from poseidon import __version__
from poseidon.errors import PoseidonError

COMMANDS = (
    "init",
    "train",
    "run",
    "worker",
    "test",
    "time",
    "extract_features",
    "download_model_binary",
    "device_query",
    "draw_net",
    "kill",
    "ps",
    "logs",
    "stats",
    "parse_log",
    "plot",
    "partition_data",
    "prepare_cifar10",
    "convert_cifar",
    "convert_imageset",
    "convert_mnist",
    "convert_mnist_siamese",
    "compute_image_mean",
    "upgrade_net_proto_binary",
    "upgrade_net_proto_text",
    "upgrade_solver_proto_text",
)
"""Each is a module of its own, which adds its parser and is imported only when it is asked for: some take seconds."""


class _Parser(argparse.ArgumentParser):
    """Refuses flags that are cut short: what they stand for would change with every new flag. A mistake is one sentence."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Exit because of words that no flag of this command takes."""
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if flag is None:
            self.error(f"did not expect '{' '.join(words)}'")
        known = re.findall(r"--(\w+)", self.format_help())
        near = difflib.get_close_matches(flag.lstrip("-"), known, n=1)
        self.error(f"unknown flag {flag}" + (f", did you mean --{near[0]}?" if near else ""))


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of one command, or of all when that is none of them."""
    parser = _Parser(
        prog="poseidon", description="Distributed deep learning for clusters on ordinary Ethernet."
    )
    parser.add_argument("--version", action="version", version=f"poseidon {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module(f"poseidon.cli.{name}").add_parser(subparsers)
        subparsers.choices[name].set_defaults(parser=subparsers.choices[name])
    return parser


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """What a command line says; a word that it cannot have ends the process with a sentence and code 2.

    Args:
        words: those of the command, which finds them in its namespace as `words`, in case it has to start itself again.
    """
    parser = build_parser(next(iter(words), None))
    parsed, strange = parser.parse_known_args(words, argparse.Namespace(words=words))
    if strange:
        parsed.parser.refuse(strange)
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Args:
        arguments: its words; those of the process when not given.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed = parse_words(words)
    except KeyboardInterrupt:  # a command takes seconds to import
        print("poseidon: interrupted", file=sys.stderr)
        return 130
    try:
        code: int = parsed.run(parsed)
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is told here, not by the dying interpreter
    except PoseidonError as error:
        print(f"poseidon {parsed.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"poseidon {parsed.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()  # whoever read it has gone; nothing more to say
        return 1
    except OSError as error:  # what no room could say better: standard output on a full disk, say
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"poseidon {parsed.command}: {place}{error.strerror or error}", file=sys.stderr)
        _drop_output()
        return 1
    return code


def _drop_output() -> None:
    """Let go of what is still to be printed: the dying interpreter would try again, and complain."""
    sys.stdout = io.StringIO()
