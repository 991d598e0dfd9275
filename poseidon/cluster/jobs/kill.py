"""Stopping the processes of one job, and no others, with or without its launcher.

Law: a process is stopped only if it is on the job's record with both its pid and its time of
creation, or has `--job <id>` as two neighbouring arguments, or descends from one that does; and
only if this user owns it. A program's name alone never decides.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil

from poseidon.base.settings import GRACE_S
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.machinefile import is_loopback
from poseidon.cluster.process import creation
from poseidon.errors import JobError, counted

AGENT = "agent"
"""The launcher of a job's record on a host that an agent serves."""
USER_KILL = signal.SIGUSR1
"""Sent to an agent when the user kills the job, on all hosts. SIGTERM may be
its host's shutdown, which a job survives.
"""
# Processes that were being started when their parent died are found in a further round.
MAX_ROUNDS = 5
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTimeouts:
    """The timeouts of a kill, in seconds.

    Attributes:
        launcher_s: from SIGTERM to the launcher, which stops the job cleanly, to SIGTERM to all
            that is left; longer than `--term_deadline` has by default.
        grace_s: from SIGTERM to SIGKILL.
    """

    launcher_s: float = 30.0
    grace_s: float = GRACE_S


def job_processes(job: str, record: JobRecord | None) -> list[psutil.Process]:
    """Return the processes of a job that run on this machine, without its launcher.

    Args:
        job: its id.
        record: its record, if there is one.
    """
    recorded = record.processes if record is not None else ()
    found = {
        process.pid: process for entry in recorded if (process := live_process(entry)) is not None
    }
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _names_job(process, job) and _ours(process):
            found[process.pid] = process
    for process in list(found.values()):
        found.update({child.pid: child for child in _descendants(process)})
    launcher = live_process(record.launcher) if record is not None else None
    if launcher is not None:
        found.pop(launcher.pid, None)
    return list(found.values())


def live_process(recorded: RecordedProcess) -> psutil.Process | None:
    """Return the running process of a record; None if it has ended, or is another user's or
    another machine's.
    """
    if not is_loopback(recorded.host):
        return None
    try:
        process = psutil.Process(recorded.pid)
        same = creation(recorded.pid) == recorded.created
    except psutil.Error:
        return None
    return process if same and _ours(process) and _alive(process) else None


def owner_of(job: str) -> str | None:
    """Return the other user of this machine whose running job this is; None where there is none."""
    for process in psutil.process_iter():
        if _names_job(process, job) and not _ours(process):
            with suppress(psutil.Error):
                return process.username()
    return None


def kill_job(job: str, registry: Registry, *, timeouts: KillTimeouts) -> int:
    """Stop a job and remove its record.

    The launcher gets SIGTERM first, since it can end the job after a complete iteration; where only
    the job's agent runs here, the agent notifies the launcher, which does not restart the job. The
    processes that are left get SIGTERM, and SIGKILL when they do not end; stopped (SIGSTOP)
    processes too.

    Args:
        job: its id.
        registry: may have its record.
        timeouts: of the launcher and of each process.

    Returns:
        How many processes were stopped.

    Raises:
        JobError: a process could not be stopped.
    """
    record = registry.read(job)
    before = job_processes(job, record)
    asked = _ask_launcher(record, before, timeouts.launcher_s)
    left = _left(job, record)
    # The others have ended, also where the launcher itself needs longer.
    stopped = sum(process not in left for process in asked)
    for _ in range(MAX_ROUNDS):
        if not left:
            with suppress(JobError):  # the next listing of jobs removes it
                registry.remove(job)
            return stopped
        stopped += _stop(left, timeouts.grace_s)
        left = _left(job, record)
    survivors = ", ".join(str(process.pid) for process in job_processes(job, record))
    ended = f"{counted(stopped, 'process')} stopped"
    raise JobError(f"job {job}: {ended}; these could not be stopped: pid {survivors}")


def _left(job: str, record: JobRecord | None) -> list[psutil.Process]:
    """Return the processes of a job that run on this machine; its launcher is the last one."""
    launcher = live_process(record.launcher) if record is not None else None
    return [*job_processes(job, record), *([] if launcher is None else [launcher])]


def _ask_launcher(
    record: JobRecord | None, before: Sequence[psutil.Process], launcher_s: float
) -> list[psutil.Process]:
    """Ask the launcher to stop the job, and wait until it has ended; return it and the job's
    processes from before.
    """
    launcher = live_process(record.launcher) if record is not None else None
    if record is None or launcher is None:
        return []
    asked = [launcher, *before]
    _send(launcher, USER_KILL if record.launcher.name == AGENT else signal.SIGTERM)
    _wait_gone([launcher], launcher_s)
    return asked


def _stop(processes: list[psutil.Process], grace_s: float) -> int:
    """End processes; return how many ended."""
    for process in processes:
        _send(process, signal.SIGTERM)
    stubborn = _wait_gone(processes, grace_s)
    for process in stubborn:
        _send(process, signal.SIGKILL)
    return len(processes) - len(_wait_gone(stubborn, grace_s))


def _send(process: psutil.Process, number: signal.Signals) -> None:
    # psutil looks at the creation time once more before it signals.
    try:
        process.send_signal(number)
        if number is not signal.SIGKILL:
            # a stopped process handles others only when it continues
            process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as error:
        raise JobError(f"process {process.pid} may not be stopped by this user") from error


def _wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for processes to end; return those that have not. (psutil waits for
    zombies too, which are not ours to reap.)
    """
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


def _names_job(process: psutil.Process, job: str) -> bool:
    try:
        return any(pair == ("--job", job) for pair in pairwise(process.cmdline()))
    except psutil.Error:
        return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children(recursive=True) if child.pid != os.getpid()]
    except psutil.Error:
        return []
