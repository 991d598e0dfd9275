"""`python -m poseidon.engine.module.script`: one worker's process that runs a script of the user's.

Started by `poseidon run`, which writes its document to the first line of standard input; then commands and events as
for `poseidon.engine.solver.worker`. The script finds this worker through `poseidon.distribute`.

Law: the launcher's line is private. Before the script runs, standard input and output are moved out of its reach: it
reads nothing, and what it prints goes to the worker's log, on rank 0 (with --show_logs=all: everywhere) also to the launcher's.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from poseidon import log
from poseidon.engine.control import ORPHAN_S, Control
from poseidon.engine.document import ScriptDocument, read_document_of
from poseidon.engine.membership import membership
from poseidon.engine.module.distribute import at_work
from poseidon.engine.module.prints import Prints
from poseidon.engine.module.workplace import Observed, Standing, ThisWorker, Workplace
from poseidon.engine.observation import Observation, open_trace, tell_plan
from poseidon.engine.saving import Written
from poseidon.errors import PoseidonError
from poseidon.exchange.base import Exchange
from poseidon.exchange.build import Built
from poseidon.exchange.observe.tracing_hooks import named_layers
from ps_server import PeerLost, ServerError, StalenessTimeout
from ps_server.numerics import prepare_process
from ps_server.trace import NO_TRACE, Tracer

LOGGER = logging.getLogger("poseidon.engine.module.script")
PROGRESS_S = 0.25


class ScriptControl(Control):
    """See `Control`."""

    notes = {  # noqa: RUF012 - never changed
        "stop": "asked to stop: after a step that all workers reach together; a second request ends the job at once",
        "snapshot": "asked for a snapshot: the script hears of it after a step that all workers reach together",
    }

    def end_without_launcher(self) -> None:
        """From now on, end this process some time after the launcher has gone."""
        threading.Thread(target=self._end, name="poseidon-orphan", daemon=True).start()

    def _end(self) -> None:
        self.gone.wait()
        time.sleep(ORPHAN_S)
        os._exit(1)


class StepTeller:
    """Tells the launcher how many steps are done, a few times a second."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._next_s = 0.0
        self._steps = self._told = 0

    def __call__(self, standing: Standing) -> None:
        """Note how far the loop has come; tell its steps when the last telling is long enough ago."""
        self._control.standing = standing
        self._steps = standing.steps
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PROGRESS_S
            self.tell()

    def tell(self) -> None:
        """Tell the latest step, unless that is told already."""
        if self._told != self._steps:
            self._told = self._steps
            self._control.tell("progress", iteration=self._steps)


class ScriptWorker:
    """One worker, from its document to the end of the script."""

    def __init__(self, document: ScriptDocument, control: Control) -> None:
        self._document = document
        self._control = control
        self._progress = StepTeller(control)

    def run(self) -> None:
        """Run the script; whatever it raises passes through."""
        document = self._document
        trace = open_trace(Path(document.output), document.rank) if document.trace else NO_TRACE
        self._control.tell("ready")
        sys.argv = [document.script, *document.arguments]
        sys.path[0] = str(Path(document.script).parent)
        try:
            with at_work(self._workplace(trace)):
                runpy.run_path(document.script, run_name="__main__")
        finally:
            self._progress.tell()

    def _workplace(self, trace: Tracer) -> Workplace:
        document = self._document
        return Workplace(
            worker=ThisWorker(
                rank=document.rank, size=document.workers, device=torch.device(document.device)
            ),
            member=membership(document),
            connect=self._control.await_connect,
            trace=trace,
            folder=Path(document.output),
            checkpoint=Path(document.snapshot) if document.snapshot else None,
            on_saved=self._tell_saved,
            observe=lambda built, module: self._observe(built, module, trace),
            on_open=self._on_open,
            on_move=self._progress,
        )

    def _observe(self, built: Built, module: nn.Module, trace: Tracer) -> Observed:
        return Observation(built, named_layers(module), trace, self._control.tell)

    def _tell_saved(self, written: Written) -> None:
        self._control.tell(
            "snapshot",
            state=str(written.state),
            iteration=written.iteration,
            seconds=round(written.seconds, 3),
        )

    def _on_open(self, built: Built, exchange: Exchange) -> None:
        self._control.obey(exchange, self._document.rank)
        if self._document.rank or built.store is None:
            return
        tell_plan(built.plan, Path(self._document.output))


def main(arguments: list[str] | None = None) -> int:
    """Run a worker; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.engine.module.script",
        description="One worker of a script; started by `poseidon run`, which writes its document to standard input.",
    )
    parser.add_argument("--job", help="marks the process as part of a job")
    parser.add_argument("--rank", help="marks the process for people")
    parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    logging.raiseExceptions = False  # a terminal that has gone must not end training
    inlet, outlet = private_streams()
    control = ScriptControl(inlet, outlet)
    try:
        document = read_document_of(ScriptDocument, inlet.readline())
        prepare_process(document.threads)
        outputs = log.setup(stream=sys.stderr, file=_log_file(document))
    except (PoseidonError, OSError) as error:
        control.tell("error", message=str(error), exit_code=getattr(error, "exit_code", 1))
        return 1
    with outputs, prints_into_log(document):
        control.end_without_launcher()
        return run_script(document, control)


def private_streams() -> tuple[TextIO, TextIO]:
    """Standard input and output for the launcher alone; afterwards file 0 is empty, and file 1 is standard error."""
    inlet, outlet = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return inlet, outlet


@contextmanager
def prints_into_log(document: ScriptDocument) -> Iterator[None]:
    """Send what is printed to the worker's log; on rank 0, and where the document says so, to standard error too."""
    before = sys.stdout
    file = _log_file(document).open("a", encoding="utf-8", buffering=1)
    kept = document.rank > 0 and not document.shows_prints
    if kept:
        os.dup2(file.fileno(), 1)
    sys.stdout = Prints((file,) if kept else (sys.stderr, file))
    try:
        yield
    finally:
        sys.stdout = before
        with suppress(OSError):  # of a full disk, which has been told
            file.close()


def run_script(document: ScriptDocument, control: Control) -> int:
    """Run a script to its end, telling how it ended; returns the exit code."""
    control.start()
    try:
        ScriptWorker(document, control).run()
    except KeyboardInterrupt as stop:  # from `Group.step`, when the job was asked to stop
        LOGGER.info("the script has ended: %s", stop or "interrupted")
    except SystemExit as end:
        if end.code not in (None, 0):
            return _failed(document, control, end, f"the script ended itself with {end.code!r}", end.code)
    except (PoseidonError, ServerError) as error:
        return _failed(document, control, error, str(error), getattr(error, "exit_code", 1))
    except Exception as error:  # noqa: BLE001 - the outermost frame: the log has it whole, the launcher hears it short
        with suppress(OSError), _log_file(document).open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        what = f"{type(error).__name__}: {error} (details in {_log_file(document)})"
        return _failed(document, control, error, what, 1)
    finally:
        control.close()
    control.tell("done")
    return 0


def _failed(document: ScriptDocument, control: Control, error: BaseException, what: str, code: object) -> int:
    """Tell the launcher one sentence with the worker, the line of the script, and what is wrong."""
    line = line_of(error, document.script)
    place = f"{Path(document.script).name}, line {line}" if line else Path(document.script).name
    sentence = f"worker {document.rank}: {place}: {what}"
    LOGGER.critical("%s", sentence)
    control.tell(
        "error",
        message=sentence,
        exit_code=code if isinstance(code, int) else 1,
        peer_lost=isinstance(error, PeerLost | StalenessTimeout),
    )
    return 1


def line_of(error: BaseException, script: str) -> int | None:
    """The line of a script that an error comes from; None where it does not come from there."""
    if isinstance(error, SyntaxError) and error.filename == script:
        return error.lineno
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == script]
    return lines[-1] if lines else None


def _log_file(document: ScriptDocument) -> Path:
    return Path(document.output) / f"worker_{document.rank}.log"


if __name__ == "__main__":
    raise SystemExit(main())
