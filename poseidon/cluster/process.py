"""The interfaces between a launcher and the processes of a job, wherever they run.

A launcher starts a `ProcessSpec` on a host; the `Listener` of the process is notified of events,
output and, last, the exit status. An agent has children (`poseidon.cluster.agent.child`), the
launcher what stands for them (`remote_process`).

Law: secrets travel in the first line of standard input only, never in argv or the environment. No
call blocks for long, and no listener is called after `exited`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from poseidon.cluster.job_plan import ProcessName
from poseidon.errors import JobError

_START_TICKS = 19
"""A field of /proc/PID/stat after the name, from 0."""


class OutputStream(Enum):
    """Where a process has written."""

    STDOUT = "stdout"
    """Standard output, of a process that has it for itself."""
    STDERR = "stderr"
    """Standard error; and standard output, except events, of a process that reports events
    there.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """The specification of one process.

    Attributes:
        name: of the process.
        argv: the program and its arguments; carries the job's id as a marker (`--job`, id) and no
            secret.
        environment: variables added to the launcher's own.
        first_line: the first line of its standard input, without the line end: one JSON document.
        own_stdout: whether standard output is the process's own. Its events then come on another
            descriptor, whose number is in $POSEIDON_EVENTS_FD.
        slot: its number among the processes of its role on its host: a worker's local rank, a
            shard's channel. A process that has paused takes the document of the same slot.
        own_stdin: whether the process may read the standard input of its launcher on the same host,
            from the descriptor whose number is in $POSEIDON_STDIN_FD.
        ignore_signals: whether the process starts ignoring the signals by which a machine or a
            scheduler ends all processes: its agent alone handles them.
        imports: modules that the process and others of its host with the same environment import;
            empty: it shares them with none.
    """

    name: ProcessName
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    first_line: bytes = field(repr=False)
    slot: int = 0
    own_stdout: bool = False
    own_stdin: bool = False
    ignore_signals: bool = False
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("argv is empty")


class Listener(Protocol):
    """Notified of a process's output and exit.

    Called from the launcher's threads, for one process in order.
    """

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """Handle a JSON object with an `event`."""

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        """Handle a piece of free text as the process wrote it: some lines, or a part of one.

        What is not UTF-8 is surrogates (`surrogateescape`).
        """

    def exited(self, name: ProcessName, status: int) -> None:
        """Handle the exit of the process; no call follows.

        Args:
            name: of the process.
            status: its exit status, or the negative number of the signal that killed it.
        """


class RunningProcess(Protocol):
    """A started process, as a job's record has it."""

    @property
    def name(self) -> ProcessName:
        """Which process it is."""

    @property
    def pid(self) -> int:
        """Its process id on its own host."""

    @property
    def created(self) -> str:
        """Its `creation` on its own host."""


def creation(pid: int) -> str:
    """Return what tells a running process from all others that have had or will have its id; empty
    if there is none.

    Linux counts the time of creation from the boot, so nothing changes when its clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {int(fields[_START_TICKS])}"
    except OSError:  # it has ended, or this is not Linux
        with suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())
        return ""


def describe_exit(status: int) -> str:
    """Describe an exit status, as the end of a sentence: `was killed by signal 9 (SIGKILL)`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was killed by signal {-status}"


Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_PROBLEMS = 100
"""Lines of one error."""


def for_each_host(
    work: Callable[[Item], Result], hosts: Sequence[Item], *, name: str, limit: int | None = None
) -> list[Result | JobError]:
    """Do the work for each host on a thread of its own.

    Args:
        work: may raise JobError; each call has its own time limit. Any other exception is raised
            here.
        hosts: one call each.
        name: of the threads.
        limit: of threads at the same time; None: one for each host.

    Returns:
        In the order of the hosts the result of each, or its JobError.
    """

    def outcome(host: Item) -> Result | JobError:
        try:
            return work(host)
        except JobError as error:
            return error

    threads = len(hosts) if limit is None else min(limit, len(hosts))
    with ThreadPoolExecutor(max(1, threads), name) as pool:
        return list(pool.map(outcome, hosts))


def format_problems(problems: Sequence[str], *, of: int) -> str:
    """Join the problems of several hosts in one error: a single one as it is, else one a line, the
    first `MOST_PROBLEMS`.

    Args:
        problems: one sentence each.
        of: the number of hosts.
    """
    if len(problems) == 1:
        return problems[0]
    hosts = "host" if of == 1 else f"{of} hosts"
    more = len(problems) - MOST_PROBLEMS
    shown = [*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
    return f"{len(problems)} problems on the {hosts}:" + "".join(f"\n  {line}" for line in shown)
