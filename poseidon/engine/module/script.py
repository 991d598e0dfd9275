"""`python -m poseidon.engine.module.script`: the process of one worker that runs a user's script.

`poseidon run` starts it and writes its document to the first line of standard input. Commands and
events follow as for `poseidon.engine.solver.worker`. The script joins the job with
`poseidon.distribute`.

Law: the connection to the launcher is private. Before the script runs, its standard streams are
replaced. It reads nothing; the one worker of a job on the launcher's host reads what the launcher
reads. What it writes goes to the worker's log. Standard error goes to the launcher too; so may
standard output.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # imports leave little garbage, and looking for it takes a sixth of the start; `main` enables it
    gc.disable()

import argparse
import logging
import os
import runpy
import signal
import sys
import time
import traceback
from bdb import BdbQuit
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

import torch
from torch import nn

from poseidon import log
from poseidon.engine.document import ScriptDocument, read_document_of
from poseidon.engine.launcher_connection import ORPHAN_S, LauncherConnection
from poseidon.engine.module.distribute import line_of, running_in
from poseidon.engine.module.script_output import output_to_log
from poseidon.engine.module.worker_context import LoopPosition, Observed, ThisWorker, WorkerContext
from poseidon.engine.observation import Observation, log_plan, open_trace
from poseidon.engine.snapshot_writer import WrittenSnapshot
from poseidon.errors import PoseidonError, UsageError
from poseidon.exchange.building.membership import Built
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.observe.tracing import named_layers
from poseidon.settings import hide_descriptors, read_settings
from ps_server import PeerLost, ServerError, StalenessTimeout
from ps_server.numerics import prepare_process
from ps_server.trace import NO_TRACE, Tracer

LOGGER = logging.getLogger("poseidon.engine.module.script")
PROGRESS_S = 0.25
NO_DEBUGGER = (
    "breakpoint() needs a terminal, which only the one worker of a job on the launcher's own host "
    "has; expected such a job, or the script under plain `python`"
)


class ScriptConnection(LauncherConnection):
    """See `LauncherConnection`."""

    notes = {  # noqa: RUF012 - never changed
        "stop": "asked to stop: the job ends after a step that all workers reach; a second "
        "request ends it at once",
        "snapshot": "asked for a snapshot: the script is notified after a step that all workers "
        "reach",
    }

    def end_without_launcher(self) -> None:
        """Start a thread that ends this process some time after the launcher has gone."""
        self._thread("poseidon-orphan", self._end).start()

    def _end(self) -> None:
        self.gone.wait()
        time.sleep(ORPHAN_S)
        os._exit(1)


class StepReporter:
    """Reports the number of finished steps to the launcher, a few times a second."""

    def __init__(self, launcher: LauncherConnection) -> None:
        self._launcher = launcher
        self._next_s = 0.0
        self._steps = self._reported = 0

    def __call__(self, position: LoopPosition) -> None:
        """Note the position of the loop; report its steps when the last report is long enough
        ago.
        """
        self._launcher.loop_position = position
        self._steps = position.steps
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PROGRESS_S
            self.report()

    def report(self) -> None:
        """Report the latest step, unless it is reported already."""
        if self._reported != self._steps:
            self._reported = self._steps
            self._launcher.send("progress", iteration=self._steps)


class ScriptWorker:
    """One worker of `poseidon run`, from its document to the end of the script.

    Attributes:
        joined: whether the script has called `distribute`.
    """

    def __init__(self, document: ScriptDocument, launcher: LauncherConnection) -> None:
        self._document = document
        self._launcher = launcher
        self._progress = StepReporter(launcher)
        self.joined = False

    def run(self) -> None:
        """Run the script. Its exceptions are raised unchanged."""
        document = self._document
        trace = open_trace(Path(document.output), document.rank) if document.trace else NO_TRACE
        self._launcher.send("ready")
        sys.argv = [document.script, *document.arguments]
        search_as_plain_python(document.script)
        try:
            with running_in(self._context(trace)):
                runpy.run_path(document.script, run_name="__main__")
        finally:
            self._progress.report()

    def _context(self, trace: Tracer) -> WorkerContext:
        document = self._document
        return WorkerContext(
            worker=ThisWorker(
                rank=document.rank, size=document.workers, device=torch.device(document.device)
            ),
            member=document.membership(),
            connect=self._launcher.exchange_addresses,
            trace=trace,
            folder=Path(document.output),
            checkpoint=Path(document.snapshot) if document.snapshot else None,
            on_saved=self._report_saved,
            observe=lambda built, module: self._observe(built, module, trace),
            on_open=self._on_open,
            on_progress=self._progress,
        )

    def _observe(self, built: Built, module: nn.Module, trace: Tracer) -> Observed:
        return Observation(built, named_layers(module), trace, self._launcher.send)

    def _report_saved(self, written: WrittenSnapshot) -> None:
        self._launcher.send(
            "snapshot",
            state=str(written.state),
            iteration=written.iteration,
            seconds=round(written.seconds, 3),
        )

    def _on_open(self, built: Built, exchange: Exchange) -> None:
        self.joined = True
        self._launcher.forward_requests(exchange, self._document.rank)
        if self._document.rank == 0 and not self._document.membership().alone:
            log_plan(built.plan, Path(self._document.output))


def main(arguments: list[str] | None = None) -> int:
    """Run a worker. Return the exit code."""
    gc.enable()
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.engine.module.script",
        description="One worker of a script; started by `poseidon run`, which writes its document "
        "to standard input.",
    )
    parser.add_argument("--job", help="marks the process as part of a job")
    parser.add_argument("--rank", help="marks the process for people")
    parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    logging.raiseExceptions = False  # a terminal that has gone must not end training
    try:
        inlet, outlet = private_streams()
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    launcher = ScriptConnection(inlet, outlet)
    try:
        document = read_document_of(ScriptDocument, inlet.readline())
        prepare_process(document.threads)
        outputs = log.setup(stream=sys.stderr, file=_log_file(document))
    except (PoseidonError, OSError) as error:
        launcher.send("error", message=str(error), exit_code=getattr(error, "exit_code", 1))
        return 1
    with outputs, output_to_log(_log_file(document), document.prints):
        launcher.end_without_launcher()
        return run_script(document, launcher)


def search_as_plain_python(script: str) -> None:
    """Let a script find modules in its own folder first, and not in the current folder, as
    `python SCRIPT` does.
    """
    sys.path[:] = [path for path in sys.path if path]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has none
        sys.path.insert(0, str(Path(script).resolve().parent))


def private_streams() -> tuple[TextIO, TextIO]:
    """Return the connection to the launcher: commands in, events out.

    From here on standard input is the launcher's, if this process may read it, or else empty.

    Raises:
        UsageError: no launcher has started this process.
    """
    settings = read_settings()
    if settings.events_fd is None:
        raise UsageError("a script's worker is started by `poseidon run`")
    hide_descriptors()
    os.set_inheritable(settings.events_fd, False)
    inlet, outlet = os.fdopen(os.dup(0), "r"), os.fdopen(settings.events_fd, "w")
    fd = os.open(os.devnull, os.O_RDONLY) if settings.stdin_fd is None else settings.stdin_fd
    os.dup2(fd, 0)
    os.close(fd)
    if settings.stdin_fd is None and not settings.debugger:
        sys.breakpointhook = refuse_breakpoint
    return inlet, outlet


def refuse_breakpoint(*_: object, **__: object) -> NoReturn:
    """Stand for `sys.breakpointhook` where a debugger has nothing to read."""
    raise UsageError(NO_DEBUGGER)


def run_script(document: ScriptDocument, launcher: LauncherConnection) -> int:
    """Run a script and report its end. Return the exit code."""
    launcher.start()
    worker = ScriptWorker(document, launcher)
    try:
        worker.run()
    except KeyboardInterrupt as stop:  # from `Group.step`, when the job was asked to stop
        LOGGER.info("the script has ended: %s", stop or "interrupted")
    except SystemExit as end:
        if end.code not in (None, 0):
            return _failed(
                document, launcher, end, f"the script ended itself with {end.code!r}", end.code
            )
    except (PoseidonError, ServerError) as error:
        return _failed(document, launcher, error, str(error), getattr(error, "exit_code", 1))
    except BdbQuit as end:
        what = NO_DEBUGGER if document.workers > 1 else "the script was ended in its debugger"
        return _failed(document, launcher, end, what, 1)
    except Exception as error:  # noqa: BLE001 - the outermost frame: the log has all of it, the launcher one sentence
        with (
            suppress(OSError),
            _log_file(document).open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            traceback.print_exc(file=file)
        message = " ".join(line.strip() for line in str(error).splitlines())
        what = f"{type(error).__name__}: {message} (details in {_log_file(document)})"
        return _failed(document, launcher, error, what, 1)
    finally:
        launcher.close()
    if worker.joined or document.workers == 1:
        launcher.send("done")
        return 0
    if document.rank == 0:
        LOGGER.warning(
            "the script has ended without poseidon.distribute(): each of the %d workers has run "
            "it by itself",
            document.workers,
        )
    launcher.send("done", joined=False)
    return 0


def _failed(
    document: ScriptDocument,
    launcher: LauncherConnection,
    error: BaseException,
    what: str,
    code: object,
) -> int:
    """Report one sentence to the launcher with the worker, the line of the script, and the error.

    Return 1.
    """
    line = line_of(error, document.script)
    location = f"{Path(document.script).name}, line {line}" if line else Path(document.script).name
    sentence = f"worker {document.rank}: {location}: {what}"
    LOGGER.critical("%s", sentence)
    launcher.send(
        "error",
        message=sentence,
        exit_code=code if isinstance(code, int) else 1,
        peer_lost=isinstance(error, PeerLost | StalenessTimeout),
    )
    return 1


def _log_file(document: ScriptDocument) -> Path:
    return Path(document.output) / f"worker_{document.rank}.log"


if __name__ == "__main__":
    raise SystemExit(main())
