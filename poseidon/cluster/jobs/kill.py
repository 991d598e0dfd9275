"""Stopping exactly the processes of one job, with or without its launcher.

Law: a process is stopped only if it is on the job's record with both its pid and its time of creation, or
carries `--job <id>` as two neighbouring words of its arguments, or descends from one that does; and only if
this user owns it. A program's name alone never decides.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil

from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.machinefile import is_loopback
from poseidon.errors import JobError

# Linux gives creation times as ticks since the boot, and the time of the boot in whole seconds, which moves by
# one when the clock is adjusted. No system hands out the same pid twice within this time.
CREATION_TOLERANCE_S = 1.5
AGENT = "agent"
"""The launcher of a job's record on a host that an agent serves."""
UNWANTED = signal.SIGUSR1
"""Tells an agent that the user wants the job gone, everywhere. SIGTERM may be its host's shutdown, which a job survives."""
# What was about to be started when its parent died is found by looking again.
MOST_ROUNDS = 5
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPatience:
    """How long a job has to go by itself, in seconds.

    Attributes:
        launcher_s: from SIGTERM to the launcher, which stops the job cleanly, to SIGTERM to all that is left; longer than
            `--term_deadline` has by default.
        grace_s: from SIGTERM to SIGKILL.
    """

    launcher_s: float = 30.0
    grace_s: float = 3.0


def job_processes(job: str, record: JobRecord | None) -> list[psutil.Process]:
    """The processes of a job that live on this machine, its launcher not among them.

    Args:
        job: its id.
        record: its record, if there is one.
    """
    recorded = record.processes if record is not None else ()
    found = {process.pid: process for entry in recorded if (process := live_process(entry)) is not None}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _carries(process, job):
            found[process.pid] = process
    for process in list(found.values()):
        found.update({child.pid: child for child in _descendants(process)})
    launcher = live_process(record.launcher) if record is not None else None
    if launcher is not None:
        found.pop(launcher.pid, None)
    return list(found.values())


def live_process(recorded: RecordedProcess) -> psutil.Process | None:
    """The running process that a record names, or None if it is gone, another's, or another machine's."""
    if not is_loopback(recorded.host):
        return None
    try:
        process = psutil.Process(recorded.pid)
        same = abs(process.create_time() - recorded.created_s) <= CREATION_TOLERANCE_S
    except psutil.Error:
        return None
    return process if same and _ours(process) and _alive(process) else None


def owner_of(job: str) -> str | None:
    """The other user of this machine to whom a running job belongs; None where none that is seen here does."""
    for process in psutil.process_iter():
        if _names_job(process, job) and not _ours(process):
            with suppress(psutil.Error):
                return process.username()
    return None


def kill_job(job: str, registry: Registry, *, patience: KillPatience, report: Callable[[str], None]) -> int:
    """Stop a job and forget it.

    The launcher is asked first, for it can end the job after a clean iteration; where the job's agent is all that is here, it
    tells the launcher that the job is not to be started again. What is left after that gets SIGTERM, and SIGKILL when it does not obey; stopped (SIGSTOP) processes too.

    Args:
        job: its id.
        registry: where its record may be.
        patience: how long to wait.
        report: hears one line for each process that was stopped.

    Returns:
        How many processes were stopped.

    Raises:
        JobError: a process could not be stopped.
    """
    record = registry.read(job)
    names = _names(record)
    stopped = _stop_launcher(record, patience.launcher_s, report)
    for _ in range(MOST_ROUNDS):
        left = job_processes(job, record)
        if record is not None and (launcher := live_process(record.launcher)) is not None:
            left.append(launcher)
        if not left:
            with suppress(JobError):  # of processes that have gone: whoever lists jobs says that it stays
                registry.remove(job)
            return stopped
        for process, how in _stop(left, patience.grace_s):
            stopped += 1
            report(f"stopped {names.get(process.pid, f'a process of {job} (pid {process.pid})')} with {how}")
    survivors = ", ".join(str(process.pid) for process in job_processes(job, record))
    raise JobError(f"job {job}: these processes could not be stopped: pid {survivors}")


def _stop_launcher(record: JobRecord | None, launcher_s: float, report: Callable[[str], None]) -> int:
    """Ask the launcher to stop the job, and say how many processes went with it."""
    launcher = live_process(record.launcher) if record is not None else None
    if record is None or launcher is None:
        return 0
    before = job_processes(record.job, record)
    names = _names(record)
    _send(launcher, UNWANTED if record.launcher.name == AGENT else signal.SIGTERM)
    if _wait_gone([launcher], launcher_s):
        return 0
    gone = [launcher, *(process for process in before if not _alive(process))]
    for process in gone:
        report(
            f"stopped {names.get(process.pid, f'a process of {record.job} (pid {process.pid})')} by asking the {record.launcher.name.removeprefix('the ')}"
        )
    return len(gone)


def _stop(processes: list[psutil.Process], grace_s: float) -> list[tuple[psutil.Process, str]]:
    """End processes; which of them ended, and by what."""
    for process in processes:
        _send(process, signal.SIGTERM)
    stubborn = _wait_gone(processes, grace_s)
    for process in stubborn:
        _send(process, signal.SIGKILL)
    left = _wait_gone(stubborn, grace_s)
    return [
        (process, "SIGKILL" if process in stubborn else "SIGTERM")
        for process in processes
        if process not in left
    ]


def _send(process: psutil.Process, number: signal.Signals) -> None:
    # psutil looks at the creation time once more before it signals.
    try:
        process.send_signal(number)
        if number is not signal.SIGKILL:
            process.send_signal(signal.SIGCONT)  # a stopped process gets any other only when it goes on
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as error:
        raise JobError(f"process {process.pid} may not be stopped by this user") from error


def _wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for processes to end; those that have not. (psutil waits for zombies too, which are not ours to reap.)"""
    end_s = time.monotonic() + timeout_s
    left = [process for process in processes if _alive(process)]
    while left and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        left = [process for process in left if _alive(process)]
    return left


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ours(process: psutil.Process) -> bool:
    try:
        return process.uids().real == os.getuid()
    except psutil.Error:
        return False


def _carries(process: psutil.Process, job: str) -> bool:
    return _names_job(process, job) and _ours(process)


def _names_job(process: psutil.Process, job: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(pair == ("--job", job) for pair in pairwise(words))


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children(recursive=True) if child.pid != os.getpid()]
    except psutil.Error:
        return []


def _names(record: JobRecord | None) -> dict[int, str]:
    if record is None:
        return {}
    entries = (record.launcher, *record.processes)
    return {entry.pid: _with_pid(entry) for entry in entries}


def _with_pid(entry: RecordedProcess) -> str:
    return (
        f"{entry.name.removesuffix(')')}, pid {entry.pid})"
        if entry.name.endswith(")")
        else f"{entry.name} (pid {entry.pid})"
    )
