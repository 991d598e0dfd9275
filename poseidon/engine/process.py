"""The process of one worker, as `python -m poseidon.engine KIND` starts it.

The launcher starts it and writes its document to the first line of its standard input. The process
then receives commands there and sends events on standard output, both as JSON lines
(`poseidon.cluster.events` lists them). The log goes to standard error and to
`<output>/worker_<rank>.log`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # imports leave little garbage, and looking for it takes a sixth of the start; `main` enables it
    gc.disable()

import argparse
import contextlib
import io
import logging
import multiprocessing.process
import multiprocessing.util
import os
import pkgutil
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from poseidon.base import glog
from poseidon.base.settings import folder_of_sockets, hide_descriptors, read_settings
from poseidon.engine.document import WorkKind, read_document
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.this_process import ending, refuse_breakpoints
from poseidon.engine.work import Work, loss_of
from poseidon.errors import (
    PoseidonError,
    described,
    limit_reached,
    out_of_memory,
    shared_memory_full,
)
from poseidon.exchange.device import compute_on, memory_in_use
from ps_server import ServerError
from ps_server.numerics import prepare_process

LOGGER = logging.getLogger("poseidon.engine.process")
WORK = {
    WorkKind.SOLVER: "poseidon.caffe.solver.worker:SolverWork",
    WorkKind.SCRIPT: "poseidon.torch.script:ScriptWork",
    WorkKind.EXTRACTION: "poseidon.caffe.tools.extractor:ExtractionWork",
}
"""The class of each kind of work; a process imports only its own."""
SYSFS = Path("/sys")
LONGEST_TRACEBACK = 16_000
"""Characters that the launcher gets of a traceback: its end."""

_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_CAUSES = ("RemoteTraceback", "_RemoteTraceback")
_NOT_OF_USERS = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    str(Path(__file__).parents[1]),
    "<",
)
_LONGEST = 400


def main(arguments: list[str] | None = None) -> int:
    """Run a worker. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.engine",
        description="One worker of a job; started by `poseidon`, which writes its document to "
        "standard input.",
    )
    parser.add_argument("kind", type=WorkKind, help="what the worker does")
    parser.add_argument("--job", help="marks the process as part of a job")
    parser.add_argument("--rank", help="marks the process for people")
    kind = parser.parse_args(arguments).kind
    if kind is not WorkKind.SCRIPT:  # which may send it to itself
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    work_class: type[Work[Any]] = pkgutil.resolve_name(WORK[kind])
    gc.enable()
    inlet, outlet = launcher_streams()
    launcher = LauncherConnection(inlet, outlet, notes=work_class.notes)
    try:
        document = read_document(work_class.document_class, inlet.readline())
        prepare_process(document.threads)
        _shorten_sockets()
        outputs = glog.setup(stream=sys.stderr, file=document.log_file)
    except (PoseidonError, OSError) as error:
        launcher.send("error", message=str(error), exit_code=getattr(error, "exit_code", 1))
        return 1
    with outputs:
        launcher.end_without_launcher()
        return run_work(work_class(document, launcher))


def launcher_streams() -> tuple[TextIO, TextIO]:
    """Return the streams of the launcher: commands in, events out.

    The standard streams are the user's code's from here on. Standard input is the launcher's own,
    if this process may read it, or else empty. Otherwise a process that a layer forks would wait
    for the thread that reads commands: `multiprocessing` closes `sys.stdin` in it. Standard output
    becomes standard error, unless the launcher has given the events a descriptor of their own. So
    no event follows text in its line.
    """
    settings = read_settings()
    inlet = os.fdopen(os.dup(0), "r")
    fd = os.open(os.devnull, os.O_RDONLY) if settings.stdin_fd is None else settings.stdin_fd
    os.dup2(fd, 0)
    os.close(fd)
    hide_descriptors()
    if settings.stdin_fd is None and not settings.debugger:
        refuse_breakpoints()
    if settings.events_fd is None:
        outlet = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        return inlet, outlet
    os.set_inheritable(settings.events_fd, False)
    return inlet, os.fdopen(settings.events_fd, "w")


def _shorten_sockets() -> None:
    """Let `multiprocessing` make its sockets in a folder whose path is short enough, here and in the
    processes that the user's code starts. Otherwise a loader that passes tensors on waits for ever.
    """
    folder = folder_of_sockets()
    if folder != tempfile.gettempdir():
        own = tempfile.mkdtemp(prefix="pymp-", dir=folder)
        multiprocessing.util.Finalize(None, shutil.rmtree, args=(own, True), exitpriority=-100)
        multiprocessing.process.current_process()._config["tempdir"] = own  # type: ignore[attr-defined]


def run_work(work: Work[Any]) -> int:
    """Do a worker's work and report its end. Return the exit code."""
    launcher = work.launcher
    device = launcher.heartbeat.device = work.device
    launcher.start()
    try:
        compute_on(device, work.document)
        bind_to_gpu(device)
        done = work.run()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the outermost frame: the log has all of it, the launcher one sentence
        report_error(error, work)
        return 1
    finally:
        launcher.close()
    launcher.finish(**done)
    if work.ends_at_once:
        os._exit(0)
    return 0


def report_error(error: BaseException, work: Work[Any]) -> None:
    """Log an error that ended the work, and report it to the launcher in one sentence."""
    error = ending(error, work.document.workers) or error
    document, location, trace = work.document, work.location(error), ""
    elsewhere = raised_elsewhere(error)
    if elsewhere is not None:
        location = elsewhere.location or location
    place = ": ".join(part for part in (f"worker {document.rank}", location) if part)
    if isinstance(error, PoseidonError | ServerError) and elsewhere is None:
        sentence = f"{place}: {error}" if location else str(error)
        exit_code = getattr(error, "exit_code", 1)
    else:
        advice = (
            (out_of_memory(error) and out_of_memory(error, memory_in_use(work.device)))
            or limit_reached(error)
            or shared_memory_full(error)
        )
        own = described(error).removesuffix(f" ({location})")  # as a SyntaxError ends
        problem = advice or (own if elsewhere is None else elsewhere.problem)
        sentence, exit_code = f"{place}: {problem} (details in {document.log_file})", 1
        trace = "".join(traceback.format_exception(error))
        with (
            contextlib.suppress(OSError),
            document.log_file.open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(trace)
    sentence = document.named(sentence)
    LOGGER.critical("%s", sentence)
    work.launcher.send(
        "error",
        message=sentence,
        exit_code=exit_code,
        **loss_of(error),
        traceback=trace[-LONGEST_TRACEBACK:],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedElsewhere:
    """An error of a process that the user's code has started: a worker of a DataLoader, of a pool
    (`multiprocessing`, `concurrent.futures`, joblib), or of `torch.multiprocessing.spawn`.

    It carries the traceback of that process as a text: in its message, or in its cause.

    Attributes:
        location: the innermost line of the user's code, as `train.py, line 7`; empty: none of its
            frames is the user's.
        problem: the type and the text of the error, on one line.
    """

    location: str
    problem: str


def raised_elsewhere(error: BaseException) -> RaisedElsewhere | None:
    """Return what an error of another process was; None for one of this process."""
    for text in _texts(error):
        _, head, innermost = text.rpartition(_HEAD)
        if head:
            found = _read(innermost)
            if found is not None:
                return found
    return None


def _texts(error: BaseException) -> Iterator[str]:
    yield str(error)
    cause = error.__cause__
    if type(cause).__name__ in _CAUSES:
        yield str(cause)


def _read(traceback: str) -> RaisedElsewhere | None:
    """Read a traceback without its head."""
    location = ""
    lines = traceback.rstrip().removesuffix('"""').strip("\n").splitlines()
    for number, line in enumerate(lines):
        if not line.startswith(" "):
            problem = " ".join(" ".join(lines[number:]).split())
            if len(problem) > _LONGEST:
                problem = f"{problem[:_LONGEST]} ..."
            return RaisedElsewhere(location=location, problem=problem)
        frame = _FRAME.match(line)
        if frame is not None and not frame[1].startswith(_NOT_OF_USERS):
            location = f"{Path(frame[1]).name}, line {frame[2]}"
    return None


def bind_to_gpu(device: torch.device, sysfs: Path = SYSFS) -> None:
    """Let the calling thread, and those that it starts, run on the cores of the host that are near
    a GPU, where the system names such among those that the process may use.
    """
    if device.type != "cuda":
        return
    known: Any = torch.cuda.get_device_properties(device)
    if not hasattr(known, "pci_bus_id"):  # of an older torch
        return
    place = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    near = cores_beside(place, sysfs)
    if near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near & os.sched_getaffinity(0))


def cores_beside(address: str, sysfs: Path = SYSFS) -> set[int]:
    """Return the cores of the NUMA node of a PCI device; empty: unknown.

    Args:
        address: as 0000:3b:00.0.

    The format: `Documentation/ABI/testing/sysfs-bus-pci` of Linux, `local_cpulist`: 0-15,32-47.
    """
    try:
        text = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii")
        edges = [part.partition("-") for part in text.strip().split(",") if part]
        return {core for low, _, high in edges for core in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return set()
