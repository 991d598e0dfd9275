"""How one start of a job ends: what the user asks of it, the pause of its processes, and their
shutdown.

Law: pure; `now` is the machine's, seconds since the job's start, and `clock_s` the caller's: the
sender of SIGTERM waits no longer for a launcher that is late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from poseidon.cluster.events import encode_command
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.causes import Cause, CauseRank, Causes, ProcessState, Remedy
from poseidon.cluster.supervision.state import Action, Kill, SendLine, SignalReceived, Terminate

# A process that computes pauses between two of its steps, which may be long. One whose heartbeats
# (every two seconds) have stopped is lost, or as good as lost.
PAUSE_S = 20.0
SILENT_S = 6.0
SILENT_PAUSE_S = 0.5
# After SIGKILL only the kernel can delay the end of a process (a dead disk or network file system).
GIVE_UP_S = 10.0


class UserRequests:
    """The requests that a job follows."""

    def __init__(self) -> None:
        self.stop: SignalReceived | None = None
        self.regroup = False
        self._stop_by_s = math.inf
        self._iterate_by_s = math.inf

    @property
    def command(self) -> str:
        """What worker 0 has to forward; empty: nothing. A stop precedes a regrouping."""
        return "stop" if self.stop is not None else "regroup" if self.regroup else ""

    def take_stop(self, signal: SignalReceived, clock_s: float, iterate_by_s: float) -> bool:
        """Take a request to stop; return whether it is a second one, which ends the job at once. One
        with a deadline of its own may be repeated. A job without an iteration is not waited for
        longer than until `iterate_by_s`.
        """
        if signal.within_s is not None:
            self._stop_by_s = min(self._stop_by_s, clock_s + signal.within_s)
        if self.stop is None:
            self.stop, self._iterate_by_s = signal, iterate_by_s
            return False
        return signal.within_s is None

    def unfinished(self, clock_s: float) -> SignalReceived | None:
        """Return the request to stop with the time that is left for it; None: there is none."""
        if self.stop is None or self._stop_by_s == math.inf:
            return self.stop
        return replace(self.stop, within_s=self._stop_by_s - clock_s)

    def overdue(
        self, workers: Sequence[ProcessState], term_deadline_s: float, now: float, clock_s: float
    ) -> Cause | None:
        """Return why the job is not waited for any more; None: it is."""
        if clock_s >= self._stop_by_s:
            within = f"the job did not end within {term_deadline_s:g} s of SIGTERM"
            return stopped(f"{within}; {lost(workers)}")
        if self.stop is not None and now >= self._iterate_by_s:
            self._iterate_by_s = math.inf
            if any(one.running for one in workers) and all(
                one.iteration is None for one in workers
            ):
                return stopped(
                    "the job was stopped before its first iteration", self.stop.exit_code
                )
        return None


class Pause:
    """The pause of a job, after a loss or in order to regroup: processes are asked to pause, and
    those that do not are killed. Workers that regroup pause by themselves, and need the shards
    until then.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._live: dict[Role, dict[ProcessName, ProcessState]] = {Role.SHARD: {}, Role.WORKER: {}}
        self._asked: set[ProcessName] = set()
        self._due = False

    @property
    def begun(self) -> bool:
        return self._began_s is not None

    @property
    def over(self) -> bool:
        """Whether no process is still to pause."""
        return not any(self._live.values())

    def begin(self, now: float) -> None:
        """Begin it, or note a further loss."""
        self._began_s = now if self._began_s is None else self._began_s
        self._due = True

    def look(self) -> None:
        """Look at all processes in the next `advance`."""
        self._due = True

    def add(self, process: ProcessState) -> None:
        """Note that a process has started."""
        self._live[process.name.role][process.name] = process
        self._due = True

    def remove(self, name: ProcessName) -> None:
        """Note that a process has paused or ended."""
        live = self._live[name.role]
        live.pop(name, None)
        self._due |= name.role is Role.WORKER and not live

    def advance(self, causes: Causes, now: float) -> list[Action]:
        """Ask processes to pause, and kill those that do not, which is a further cause. Without a
        cause the job regroups.
        """
        if not self._due or self._began_s is None:
            return []
        self._due = False
        actions: list[Action] = []
        regroups = not causes.known and self._live[Role.WORKER]
        for process in [process for live in self._live.values() for process in live.values()]:
            limit_s = SILENT_PAUSE_S if now - process.reported_s > SILENT_S else PAUSE_S
            if now - self._began_s >= limit_s:
                self.remove(process.name)
                self._due = True
                sentence = f"{process.label} did not pause within {limit_s:g} s{process.when}"
                causes.known.append(
                    Cause(rank=CauseRank.ROOT, sentence=sentence, remedy=Remedy.RESTART)
                )
                actions.append(Kill(name=process.name))
            elif process.name not in self._asked and not regroups:
                self._asked.add(process.name)
                actions.append(SendLine(name=process.name, line=encode_command("pause")))
        return actions


class JobShutdown:
    """The end of a job that fails: SIGTERM, after `grace_s` SIGKILL, and no wait for what outlives
    that.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._due_s = math.inf
        self._step: type[Terminate | Kill] | None = Terminate

    @property
    def begun(self) -> bool:
        return self._due_s < math.inf

    @property
    def waits(self) -> bool:
        """Whether SIGTERM was not sent yet: later reports and exits are its consequences."""
        return self._step is Terminate

    def begin(self, at_s: float) -> None:
        """Send SIGTERM then, or earlier if it was due earlier."""
        self._due_s = min(self._due_s, at_s)

    def hurry(self, now: float) -> None:
        """Send SIGKILL at once."""
        if self._step is not None:
            self._due_s, self._step = now, Kill

    def given_up(self, now: float) -> bool:
        """Return whether the processes that are left are not waited for any more."""
        return self._step is None and now >= self._due_s

    def step(self, now: float) -> type[Terminate | Kill] | None:
        """Return the signal that is due for all processes that run, once; None: none is."""
        step = self._step
        if step is None or now < self._due_s:
            return None
        self._due_s = now + (self._grace_s if step is Terminate else GIVE_UP_S)
        self._step = Kill if step is Terminate else None
        return step


def stopped(sentence: str, exit_code: int = 1) -> Cause:
    """Return the cause that a request to stop is."""
    return Cause(rank=CauseRank.ROOT, sentence=sentence, exit_code=exit_code)


def lost(workers: Sequence[ProcessState]) -> str:
    """Return what is lost at the end of a job that is not waited for."""
    since = "the last snapshot" if any(worker.saved for worker in workers) else "its start"
    return f"iterations since {since} are lost"
