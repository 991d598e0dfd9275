"""The processes of one job, as far as they have reported."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.base.call_names import LoopPosition
from poseidon.cluster.events import Paused
from poseidon.cluster.job_plan import ProcessName, Role


@dataclass(slots=True, kw_only=True)
class ProcessState:
    """The state of one process."""

    name: ProcessName
    reported_s: float = 0.0
    moved_s: float | None = None
    position: LoopPosition | None = None
    pid: int | None = None
    ready: bool = False
    iteration: int | None = None
    saved: bool = False
    """A snapshot, in this start."""
    explained: bool = False
    finish_by_s: float | None = None
    paused: Paused | None = None
    status: int | None = None

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self.pid is not None and self.status is None

    @property
    def label(self) -> str:
        """The process in messages."""
        return self.name.describe(self.pid)

    @property
    def when(self) -> str:
        """The iteration or phase, at the end of a sentence. Not every iteration is reported."""
        if self.iteration is not None:
            return f", last seen at iteration {self.iteration}"
        return "" if self.ready else " while it was starting"


class JobProcesses:
    """All processes of the job."""

    def __init__(self, names: Sequence[ProcessName]) -> None:
        self.by_name = {name: ProcessState(name=name) for name in names}
        self.workers = [self.by_name[name] for name in names if name.role is Role.WORKER]
        self.shards = [name for name in names if name.role is Role.SHARD]
        self.unstarted, self.unready = set(names), set(names)

    @property
    def running(self) -> list[ProcessState]:
        return [process for process in self.by_name.values() if process.running]

    @property
    def ended(self) -> bool:
        """Whether no process runs."""
        return not any(process.running for process in self.by_name.values())

    @property
    def iteration(self) -> int:
        """The last iteration that any worker has reported."""
        reported = (worker.iteration or 0 for worker in self.workers)
        beats = (worker.position.iterations for worker in self.workers if worker.position)
        return max(itertools.chain(reported, beats))

    def start(self, name: ProcessName, pid: int, now: float) -> ProcessState:
        """Note that a process has started; return it."""
        process = self.by_name[name]
        process.pid, process.reported_s = pid, now
        self.unstarted.discard(name)
        return process

    def note_ready(self, process: ProcessState) -> None:
        process.ready = True
        self.unready.discard(process.name)
