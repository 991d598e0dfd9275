"""`poseidon.launch`: a function of a notebook, of an interactive session or of a script, called by
the workers of a job.

Law: no process outlives the call.
"""

from __future__ import annotations

import argparse
import linecache
import os
import pickle
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import cloudpickle

from poseidon.errors import JobError, UsageError, nearest
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.flags.flag import flag_of
from poseidon.launcher.request import ScriptRequest
from poseidon.launcher.runner import launch as start
from poseidon.launcher.site import site_of
from poseidon.torch.script_job import ScriptJob

CALL = '''"""Calls the function that poseidon.launch was given, which is in this archive, too."""

import linecache
import sys

import cloudpickle
from poseidon.engine.this_process import name_lines_of

call = cloudpickle.loads(__loader__.get_data("call"))
file, source = call["file"], call["source"]
sys.path.extend(path for path in call["paths"] if path not in sys.path)
name_lines_of(file, call["label"])
linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
function, arguments = cloudpickle.loads(call["function"])
if hasattr(function, "__code__"):  # cloudpickle leaves the file out, so tracebacks had no lines
    function.__code__ = function.__code__.replace(co_filename=file)
function(*arguments)
'''
_OF_SCRIPTS = frozenset({"script", "arguments", "module", "background", "job"})
"""Fields of a request that a function has no use for."""


def launch(
    function: Callable[..., object],
    args: Sequence[Any] = (),
    workers: int | None = None,
    **options: object,
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
        options: of `poseidon run`, such as `gpu="0,1"`, `hostfile="cluster"`, `exchange="svb"`,
            `local_steps=20, outer_lr=1.0` or `ddp=True`.

    Raises:
        UsageError: an option is wrong, the function cannot be sent, or this process is a worker.
        JobError: a worker has failed; the text ends with the worker's traceback.
        KeyboardInterrupt: the job was stopped by an interrupt.
    """
    if _is_worker():
        raise UsageError(
            "launch() was called by a worker of a job; call it only in the process that starts "
            "the job"
        )
    if workers is None and not {"gpu", "hostfile"} & options.keys():
        workers = 2
    if workers is not None:
        options = {**options, "workers": workers}
    with tempfile.TemporaryDirectory(prefix="poseidon-") as folder:
        archive = Path(folder, getattr(function, "__name__", "function").strip("<>"))
        _write_call(archive, function, tuple(args))
        request = _request(options, archive)
        try:
            code = start(lambda: ScriptJob(request, site_of(request)))
        except JobError as error:
            if error.exit_code == 128 + signal.SIGINT:  # before the first iteration
                raise KeyboardInterrupt(str(error)) from None
            if not error.traceback:
                raise
            failed = JobError()
            failed.args = (f"{error}\n\n{_of_function(error.traceback, str(archive))}",)
            failed.exit_code, failed.traceback = error.exit_code, error.traceback
            raise failed from None
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise JobError(f"the job was stopped (exit code {code})")


def _request(options: Mapping[str, object], archive: Path) -> ScriptRequest:
    """Return what a job with these options is asked for.

    Raises:
        UsageError: there is no such option, or a value is wrong.
    """
    found: dict[type, dict[str, Any]] = {ExchangeOptions: {}, ScriptRequest: {}}
    places = {
        name: (kind, entry.name, flag)
        for kind in found
        for entry in fields(kind)
        if (flag := flag_of(entry)) and entry.name not in _OF_SCRIPTS
        for name in (entry.name, *flag.names)
    }
    for name, value in options.items():
        if name not in places:
            near = nearest(name, places)
            hint = f"; did you mean '{near}'?" if near else ""
            raise UsageError(f"launch() has no argument '{name}'{hint}")
        kind, field, flag = places[name]
        if value is not None:
            text = str(value.value if isinstance(value, Enum) else value)
            try:
                found[kind][field] = flag.read(text)
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"launch(): {name}: {error}") from error
    exchange = ExchangeOptions(**found[ExchangeOptions])
    return ScriptRequest(
        script=archive,
        exchange=exchange,
        server_requested=exchange.kind not in (ExchangeKind.AUTO, ExchangeKind.LOCAL),
        **found[ScriptRequest],
    )


def _is_worker() -> bool:
    """Return whether this process is a worker of a job; imports nothing."""
    loaded = sys.modules.get("poseidon.engine.this_process")
    return loaded is not None and loaded.current_context().folder is not None


def _write_call(archive: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Write an archive that Python runs as a script: it calls a function."""
    try:
        pickled = cloudpickle.dumps((function, arguments))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"launch() cannot send {getattr(function, '__name__', function)!r} to other processes: "
            f"{error}; expected a function and arguments that cloudpickle can send (no open files, "
            "locks or generators)"
        ) from error
    code = getattr(function, "__code__", None)
    file = code.co_filename if code is not None else ""
    call = {
        "paths": [os.path.abspath(path) for path in sys.path],
        "source": "".join(linecache.getlines(file)),
        "file": file,
        "label": _label(function, file),
        "function": pickled,
    }
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("__main__.py", CALL)
        content.writestr("call", cloudpickle.dumps(call))


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


def _of_function(trace: str, archive: str) -> str:
    """Return a traceback from the function's own frame on."""
    head, called, rest = trace.rpartition(f'  File "{archive}/__main__.py"')
    if not called:
        return trace
    frames = rest.split('\n  File "', 1)
    return f'{head.partition(chr(10))[0]}\n  File "{frames[1]}' if len(frames) > 1 else trace
