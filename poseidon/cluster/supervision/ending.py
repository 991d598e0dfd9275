"""How the processes of one start of a job end: they pause, or are ended.

Law: pure; `now` is the machine's, seconds since the job's start.
"""

from __future__ import annotations

import math

from poseidon.cluster.events import encode_command
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.causes import Cause, CauseRank, Causes, Remedy
from poseidon.cluster.supervision.processes import ProcessState
from poseidon.cluster.supervision.state import Action, Kill, SendLine, Terminate

# A process that computes pauses between two of its steps, which may be long. One whose heartbeats
# (every two seconds) have stopped is lost, or as good as lost.
PAUSE_S = 20.0
SILENT_S = 6.0
SILENT_PAUSE_S = 0.5
# After SIGKILL only the kernel can delay the end of a process (a dead disk or network file system).
GIVE_UP_S = 10.0


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


class Shutdown:
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
