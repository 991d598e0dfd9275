"""The life of a job as a state machine: what happened goes in, what to do comes out.

    STARTING --all shards listen, workers ready--> RUNNING --all workers done and gone--> FINISHING
        |                                             |                                     | all gone
        +---------------- a cause -------------------+--> FAILING --all gone--> ENDED <-----+

Laws:
* Nothing here starts, signals, waits or reads a clock; `now` (seconds, monotonic) comes with every input.
* Any process that ends before its time, says an error, or falls silent ends the whole job, and the job's
  error is the sentence of the cause that stands nearest to the root (`CauseRank`).
* From FAILING on, every process is asked to end, then made to; the machine always comes to ENDED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from poseidon.cluster.events import (
    Alive,
    Done,
    Event,
    Failed,
    Listening,
    Place,
    Progress,
    Ready,
    encode_command,
)
from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.process import exit_words
from poseidon.cluster.supervision.out_of_step import out_of_step
from poseidon.cluster.supervision.settings import SignalEffect, SupervisionSettings
from poseidon.cluster.supervision.steps import (
    Action,
    Cause,
    CauseRank,
    Exited,
    Heard,
    Input,
    JobState,
    Kill,
    NotStarted,
    Outcome,
    Remedy,
    Requested,
    Send,
    Started,
    Terminate,
)
from poseidon.errors import JobError, JobInterrupted

# Longer than this between two inputs, and it was the launcher that slept (Ctrl-Z, a frozen terminal, a
# suspended machine), not the processes: all deadlines move on by the time that was lost.
LONGEST_PAUSE_S = 5.0
# After SIGKILL only the kernel can hold a process back (a dead disk or network file system).
GIVE_UP_S = 10.0


@dataclass(slots=True, kw_only=True)
class _Process:
    """What is known of one process."""

    name: ProcessName
    heard_s: float
    moved_s: float | None = None
    place: Place | None = None
    pid: int | None = None
    ready: bool = False
    address: str | None = None
    iteration: int | None = None
    explained: bool = False
    finish_by_s: float | None = None
    status: int | None = None

    @property
    def running(self) -> bool:
        return self.pid is not None and self.status is None

    @property
    def words(self) -> str:
        return self.name.describe(self.pid)

    @property
    def when(self) -> str:
        if self.iteration is not None:
            return f" at iteration {self.iteration}"
        return "" if self.ready else " while it was starting"


@dataclass(slots=True, kw_only=True)
class _Ending:
    """The deadlines of a failing job; None once past."""

    terminate_at_s: float | None
    kill_at_s: float | None = None
    give_up_at_s: float | None = None
    causes: list[Cause] = field(default_factory=list)


class Supervision:
    """One job.

    Args:
        names: all its processes; at least one worker.
        settings: how long to wait for what.
        now: seconds, on the clock that all later calls use.
    """

    def __init__(self, names: Sequence[ProcessName], settings: SupervisionSettings, now: float) -> None:
        self._settings = settings
        self._processes = {name: _Process(name=name, heard_s=now) for name in names}
        self._workers = [self._processes[name] for name in names if name.role is Role.WORKER]
        self._shards = [self._processes[name] for name in names if name.role is Role.SHARD]
        self._last_input_s = now
        self._start_by_s = now + settings.start_timeout_s
        self._state = JobState.STARTING
        self._connected = False
        self._stop_requested = False
        self._stop_code = 0
        self._unwanted = False
        self._stop_by_s = math.inf
        self._ending: _Ending | None = None

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self._state

    @property
    def all_ready(self) -> bool:
        """Whether every shard listens and every worker has loaded what it needs."""
        return all(process.ready for process in self._processes.values())

    @property
    def outcome(self) -> Outcome:
        """How a job that ended without an error has ended."""
        return Outcome.STOPPED if self._stop_requested else Outcome.FINISHED

    @property
    def exit_code(self) -> int:
        """Of a job that ended without an error: 0 where it has finished, else that of the request to stop."""
        return self._stop_code if self._stop_requested else 0

    @property
    def iteration(self) -> int:
        """The last iteration that the first worker told of; 0 before any."""
        return self._workers[0].iteration or 0

    @property
    def error(self) -> JobError | None:
        """The job's error: one sentence and an exit code; None while there is no cause."""
        if self._ending is None:
            return None
        cause = min(self._ending.causes, key=lambda cause: cause.rank)
        left = [process.words for process in self._processes.values() if process.running]
        survivors = f"; these did not end: {', '.join(left)}" if left and self._ended() else ""
        error = self._error(cause, cause.sentence + survivors)
        error.exit_code = cause.exit_code
        return error

    def _error(self, cause: Cause, sentence: str) -> JobError:
        if cause.remedy is Remedy.NONE:
            return JobError(sentence)
        if self._unwanted:
            return JobError(f"{sentence}; it is not started again, since it was asked to end")
        retry = cause.remedy is Remedy.RETRY
        return JobInterrupted(sentence, iteration=self.iteration, while_starting=retry)

    def handle(self, what: Input, now: float) -> list[Action]:
        """Take one input and say what to do.

        Args:
            what: what has happened.
            now: seconds, never less than at the call before.
        """
        self._forgive_pause(now)
        actions: list[Action] = []
        if isinstance(what, Started):
            process = self._processes[what.name]
            process.pid, process.heard_s = what.pid, now
        elif isinstance(what, NotStarted):
            self._unwanted |= what.unwanted
            self._fail(Cause(rank=CauseRank.ROOT, sentence=what.message, remedy=Remedy.RETRY), now)
        elif isinstance(what, Heard):
            self._hear(self._processes[what.name], what.event, now)
        elif isinstance(what, Exited):
            self._see_exit(self._processes[what.name], what, now)
        elif isinstance(what, Requested):
            actions += self._request(what, now)
        self._watch_clocks(now)
        return actions + self._advance(now)

    def _hear(self, process: _Process, event: Event, now: float) -> None:
        process.heard_s = now
        if isinstance(event, Listening):
            process.address, process.ready = event.address, True
        elif isinstance(event, Ready):
            process.ready = True
        elif isinstance(event, Alive):
            process.moved_s = None if event.still_s is None else now - event.still_s
            self._place(process, event.place, now)
        elif isinstance(event, Progress):
            process.iteration, process.ready = event.iteration, True
        elif isinstance(event, Done):
            process.ready = True
            process.finish_by_s = now + self._settings.finish_timeout_s
        elif isinstance(event, Failed):
            process.explained = True
            rank = CauseRank.PEER_LOST if event.peer_lost else CauseRank.OWN_ERROR
            rank = CauseRank.ROOT if event.host_lost else rank
            remedy = Remedy.RESTART if event.peer_lost or event.host_lost else Remedy.NONE
            self._unwanted |= event.unwanted
            self._fail(
                Cause(rank=rank, sentence=event.message, exit_code=event.exit_code, remedy=remedy), now
            )

    def _place(self, process: _Process, place: Place | None, now: float) -> None:
        """Note how far a script's loop has come, and end a job whose workers can never meet again."""
        if place is None:
            return
        process.place = place
        places = {worker.name.index: worker.place for worker in self._workers if worker.place is not None}
        sentence = out_of_step(places)
        if sentence is not None:
            self._fail(Cause(rank=CauseRank.OWN_ERROR, sentence=sentence), now)

    def _see_exit(self, process: _Process, exited: Exited, now: float) -> None:
        process.status = exited.status
        ended_well = exited.status == 0 and process.finish_by_s is not None
        if ended_well or process.explained:
            return
        if exited.status < 0:
            rank, words = CauseRank.ROOT, exit_words(exited.status) + process.when
        elif exited.status > 0:
            rank, words = CauseRank.UNEXPLAINED, exit_words(exited.status) + process.when
        else:
            rank, words = CauseRank.UNEXPLAINED, f"ended before its work was done{process.when}"
        last = f", last saying '{exited.last_line}'" if exited.last_line and exited.status > 0 else ""
        # One that ends by itself before it is ready has no chance another time either.
        lost = exited.status < 0 or process.ready
        self._fail_of(process, rank, words + last, now, Remedy.RESTART if lost else Remedy.NONE)

    def _request(self, what: Requested, now: float) -> list[Action]:
        effect = what.effect
        if effect is SignalEffect.SNAPSHOT and self._state is JobState.RUNNING:
            return [Send(name=self._workers[0].name, line=encode_command("snapshot"))]
        self._unwanted |= effect is SignalEffect.STOP
        if effect is not SignalEffect.STOP or self._state is JobState.FINISHING:
            return []
        if self._state is JobState.FAILING:
            return self._kill_all(now)
        if self._state is JobState.STARTING:
            sentence = "the job was stopped before it had started"
            self._fail(Cause(rank=CauseRank.ROOT, sentence=sentence, exit_code=what.exit_code), now)
            return []
        if what.within_s is not None:
            self._stop_by_s = min(self._stop_by_s, now + what.within_s)
        if self._stop_requested and what.within_s is not None:
            return []  # it is under way, and has its deadline
        if self._stop_requested:
            sentence = "the job was ended at once by a second request to stop; iterations since the last snapshot are lost"
            self._fail(Cause(rank=CauseRank.ROOT, sentence=sentence), now)
            return self._kill_all(now)
        self._stop_requested, self._stop_code = True, what.exit_code
        return [Send(name=self._workers[0].name, line=encode_command("stop"))]

    def _watch_clocks(self, now: float) -> None:
        if self._state in (JobState.FAILING, JobState.ENDED):
            return
        patience = self._settings
        if now >= self._stop_by_s:
            sentence = (
                f"the job did not end within {patience.term_deadline_s:g} s of SIGTERM; "
                "iterations since the last snapshot are lost"
            )
            self._fail(Cause(rank=CauseRank.ROOT, sentence=sentence), now)
            return
        for process in [process for process in self._processes.values() if process.running]:
            silent_s = now - process.heard_s
            if not process.ready and now >= self._start_by_s:
                words = f"was not ready within {patience.start_timeout_s:g} s"
            elif process.finish_by_s is not None and now >= process.finish_by_s:
                words = f"did not end within {patience.finish_timeout_s:g} s of finishing its work"
            elif process.ready and silent_s >= patience.stall_timeout_s:
                words = f"has given no sign of life for {patience.stall_timeout_s:g} s{self._since(process)}"
            elif process.moved_s is not None and now - process.moved_s >= patience.stall_timeout_s:
                words = f"hangs: it has done nothing for {patience.stall_timeout_s:g} s{self._since(process)}"
            else:
                continue
            remedy = Remedy.RESTART if process.ready else Remedy.RETRY
            self._fail_of(process, CauseRank.ROOT, words, now, remedy)

    def _since(self, process: _Process) -> str:
        return f" (the last at iteration {process.iteration})" if process.iteration is not None else ""

    def _fail_of(
        self, process: _Process, rank: CauseRank, words: str, now: float, remedy: Remedy = Remedy.RESTART
    ) -> None:
        self._fail(
            Cause(rank=rank, sentence=f"{process.words} {words}; the job was stopped", remedy=remedy), now
        )

    def _fail(self, cause: Cause, now: float) -> None:
        wait_s = 0.0 if cause.rank is CauseRank.ROOT else self._settings.collect_s
        if self._state is JobState.ENDED:
            return
        if self._ending is None:
            self._state = JobState.FAILING
            self._ending = _Ending(terminate_at_s=now + wait_s)
        # Once they have been asked to end, what they say and how they go is our own doing.
        if self._ending.terminate_at_s is not None:
            self._ending.causes.append(cause)
            self._ending.terminate_at_s = min(self._ending.terminate_at_s, now + wait_s)

    def _advance(self, now: float) -> list[Action]:
        """Make the transitions that are due."""
        actions: list[Action] = []
        if self._state is JobState.STARTING:
            actions += self._connect()
        if self._state is JobState.RUNNING and all(worker.status == 0 for worker in self._workers):
            self._state = JobState.FINISHING
            actions += self._stop_shards(now)
        if self._state is JobState.FAILING:
            actions += self._end_processes(now)
        if self._state in (JobState.FINISHING, JobState.FAILING) and self._ended():
            self._state = JobState.ENDED
        return actions

    def _connect(self) -> list[Action]:
        actions: list[Action] = []
        addresses = [shard.address for shard in self._shards]
        all_started = all(process.pid is not None for process in self._processes.values())
        if not self._connected and all_started and None not in addresses:
            self._connected = True
            line = encode_command("connect", shards=addresses)
            actions += [Send(name=worker.name, line=line) for worker in self._workers]
        # Once a worker trains there is something to lose: a stop is then a clean one.
        trains = any(worker.iteration is not None for worker in self._workers)
        if self._connected and (trains or all(worker.ready for worker in self._workers)):
            self._state = JobState.RUNNING
        return actions

    def _stop_shards(self, now: float) -> list[Action]:
        for shard in self._shards:
            shard.finish_by_s = now + self._settings.finish_timeout_s
        return [Send(name=shard.name, line=encode_command("stop")) for shard in self._shards]

    def _end_processes(self, now: float) -> list[Action]:
        ending = self._ending
        assert ending is not None
        if ending.terminate_at_s is not None and now >= ending.terminate_at_s:
            ending.terminate_at_s = None
            ending.kill_at_s = now + self._settings.grace_s
            return [Terminate(name=name) for name in self._running()]
        if ending.kill_at_s is not None and now >= ending.kill_at_s:
            return self._kill_all(now)
        return []

    def _kill_all(self, now: float) -> list[Action]:
        assert self._ending is not None
        self._ending.terminate_at_s = self._ending.kill_at_s = None
        self._ending.give_up_at_s = self._ending.give_up_at_s or now + GIVE_UP_S
        return [Kill(name=name) for name in self._running()]

    def _running(self) -> list[ProcessName]:
        return [process.name for process in self._processes.values() if process.running]

    def _ended(self) -> bool:
        if not any(process.running for process in self._processes.values()):
            return True
        give_up_at_s = self._ending.give_up_at_s if self._ending else None
        return give_up_at_s is not None and self._last_input_s >= give_up_at_s

    def _forgive_pause(self, now: float) -> None:
        lost_s = now - self._last_input_s
        self._last_input_s = now
        if lost_s <= LONGEST_PAUSE_S:
            return
        self._start_by_s += lost_s
        # `_stop_by_s` stays: whoever sent SIGTERM does not wait longer for that.
        for process in self._processes.values():
            process.heard_s += lost_s
            if process.moved_s is not None:
                process.moved_s += lost_s
            if process.finish_by_s is not None:
                process.finish_by_s += lost_s
