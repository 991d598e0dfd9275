"""`poseidon.launch`: a function of a notebook, of an interactive session or of a script, called by
the workers of a job.

Law: no process outlives the call.
"""

from __future__ import annotations

import argparse
import base64
import linecache
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from poseidon.cli.parsers.jobs import COMMANDS
from poseidon.cli.parsers.reading import Mistake
from poseidon.cli.run import run
from poseidon.errors import JobError, UsageError, nearest

RUN = next(command for command in COMMANDS if command.name == "run")
SCRIPT = '''"""Calls a function of the process that has started the job by poseidon.launch."""

import base64
import linecache
import sys

import cloudpickle
from poseidon.torch.distribute import name_lines_of

sys.path.extend(path for path in {paths!r} if path not in sys.path)
name_lines_of({filename!r}, {label!r})
SOURCE = {source!r}
linecache.cache[{filename!r}] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), {filename!r})
function, arguments = cloudpickle.loads(base64.b64decode({pickled!r}))
if hasattr(function, "__code__"):  # cloudpickle leaves the file out, so tracebacks had no lines
    function.__code__ = function.__code__.replace(co_filename={filename!r})
function(*arguments)
'''


def launch(
    function: Callable[..., object],
    args: Sequence[Any] = (),
    workers: int | None = None,
    **flags: object,
) -> None:
    """Call a function on every worker of a new job; return when all have returned.

        def train(epochs):
            model = ...
            with poseidon.distribute(model, optimizer) as group:
                ...

        poseidon.launch(train, args=(3,), workers=2)

    What rank 0 prints appears here, and warnings of the others. An interrupt (Ctrl-C, or a
    notebook's stop button) stops the job.

    Args:
        function: it may be defined in a notebook. It and its arguments are sent to the workers by
            cloudpickle, and what it changes outside of itself stays there.
        args: its arguments.
        workers: on this machine, with one CPU device each; None: two, unless `gpu` or `hostfile`
            says how many.
        flags: of `poseidon run`, such as `gpu="0,1"`, `hostfile="cluster"`, `exchange="svb"` or
            `ddp=True`.

    Raises:
        UsageError: a flag is wrong, the function cannot be sent, or this process is a worker.
        JobError: a worker has failed; the text ends with the worker's traceback.
        KeyboardInterrupt: the job was stopped by an interrupt.
    """
    if _is_worker():
        raise UsageError(
            "launch() was called by a worker of a job, which would start a job in a job; expected "
            "it in the process that starts the job"
        )
    if workers is None and not {"gpu", "hostfile"} & flags.keys():
        workers = 2
    if workers is not None:
        flags = {"num_app_threads": workers, **flags}
    with tempfile.TemporaryDirectory(prefix="poseidon-") as folder:
        script = Path(folder, f"{getattr(function, '__name__', 'function').strip('<>')}.py")
        script.write_text(_script_of(function, tuple(args)), encoding="utf-8")
        try:
            code = run(_read(flags, str(script)))
        except JobError as error:
            if not error.traceback:
                raise
            failed = JobError()
            failed.args = (f"{error}\n\n{_of_function(error.traceback, str(script))}",)
            failed.exit_code, failed.traceback = error.exit_code, error.traceback
            raise failed from None
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise JobError(f"the job was stopped (exit code {code})")


def _read(flags: dict[str, object], script: str) -> argparse.Namespace:
    """Return the command line of `poseidon run` with these flags.

    Raises:
        UsageError: it has no such flag, or a value is wrong.
    """
    parser = RUN.parser()
    names = {name for flag in parser.flags() for name in flag.names}
    for name in flags:
        if name not in names:
            near = nearest(name, ("workers", *(flag.name for flag in parser.flags() if flag.text)))
            hint = f"; did you mean '{near}'?" if near else ""
            raise UsageError(f"launch() has no argument '{name}'{hint}")
    try:
        return parser.read([*_words(flags), script])
    except Mistake as mistake:
        raise UsageError(f"launch(): {mistake}") from mistake


def _is_worker() -> bool:
    """Return whether this process is a worker of a job; imports nothing."""
    loaded = sys.modules.get("poseidon.torch.distribute")
    return loaded is not None and loaded.current_context().folder is not None


def _words(flags: dict[str, object]) -> list[str]:
    return [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in flags.items()
        if value is not None
    ]


def _script_of(function: Callable[..., object], arguments: tuple[Any, ...]) -> str:
    """Return the script that calls a function."""
    try:
        pickled = cloudpickle.dumps((function, arguments))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"launch() cannot send {getattr(function, '__name__', function)!r} to other processes: "
            f"{error}; expected a function and arguments that cloudpickle can send (no open files, "
            "locks or generators)"
        ) from error
    code = getattr(function, "__code__", None)
    filename = code.co_filename if code is not None else ""
    return SCRIPT.format(
        paths=[os.path.abspath(path) for path in sys.path],
        source="".join(linecache.getlines(filename)),
        filename=filename,
        label=_label(function, filename),
        pickled=base64.b64encode(pickled),
    )


def _label(function: Callable[..., object], file: str) -> str:
    """Return what errors call the file of a function: a cell of a notebook by its number, a function
    of an interactive session by its name.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell.compile.format_code_name(file) if shell is not None else None
    if cell is not None:
        return " ".join(cell)  # Cell In[5]
    name = getattr(function, "__name__", type(function).__name__)
    return Path(file).name if os.path.isfile(file) else f"function {name}"


def _of_function(trace: str, script: str) -> str:
    """Return a traceback from the function's own frame on."""
    head, called, rest = trace.rpartition(f'  File "{script}"')
    if not called:
        return trace
    frames = rest.split('\n  File "', 1)
    return f'{head.partition(chr(10))[0]}\n  File "{frames[1]}' if len(frames) > 1 else trace
