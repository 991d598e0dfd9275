"""The state machine of a job: events in, actions out.

    STARTING --all shards listen, workers ready--> RUNNING --all workers done and gone--> FINISHING
        |                                             |                                     | all gone
        +---------------- a cause -------------------+--> FAILING --all gone--> ENDED <-----+
        +----- a loss, of a job whose processes pause +--> PAUSING --all paused-> ENDED

Laws:
* Nothing here starts, signals, waits or reads a clock; `now` (seconds, monotonic) comes with every
  event.
* Any process that ends early, reports an error, or falls silent ends the whole job.
* Where processes pause (`Pausing`) a loss ends this start of the job alone: the others are asked to
  pause, and who does not is killed. An error of a process's own, and a stop by the user, end all.
* From FAILING on, every process gets SIGTERM, then SIGKILL; the machine always reaches ENDED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from poseidon.cluster import events
from poseidon.cluster.events import encode_command
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.supervision.addresses import AddressExchanges
from poseidon.cluster.supervision.causes import (
    Cause,
    CauseRank,
    Causes,
    JobProcesses,
    ProcessState,
    Remedy,
    ended_early,
    overdue,
    reported,
)
from poseidon.cluster.supervision.ending import JobShutdown, Pause, UserRequests, lost, stopped
from poseidon.cluster.supervision.positions import LoopPositions
from poseidon.cluster.supervision.state import (
    Action,
    JobEvent,
    JobResult,
    JobState,
    Outcome,
    Pausing,
    ProcessExited,
    ProcessReported,
    ProcessStarted,
    ProcessStartFailed,
    RegroupRequested,
    SendLine,
    SignalEffect,
    SignalReceived,
    SupervisionSettings,
    Tick,
)
from poseidon.errors import JobError

# A longer pause between two events means that the launcher was late (a busy machine) or suspended
# (Ctrl-Z, a frozen terminal), not the processes: what it was longer does not count. So a launcher
# that is always late finds every silence, too.
LONGEST_WAIT_S = 1.0
# After a request to stop: a worker that has made no iteration may wait where no request reaches it,
# and there is nothing to keep. Heartbeats may be late.
FIRST_ITERATION_S = 4.0
LOOK_S = 0.05
"""The least time between two looks at the deadlines of all processes, save for ticks."""


class _Clock:
    """The seconds that the launcher has run, since the job's start."""

    def __init__(self, now: float) -> None:
        self.now = now
        """The last event's, on the caller's clock."""
        self._began_s = now

    def run(self, now: float) -> float:
        """Return them, at the next event."""
        self._began_s += max(0.0, now - self.now - LONGEST_WAIT_S)
        self.now = now
        return now - self._began_s


class JobStateMachine:
    """The state machine of one job.

    Args:
        names: all its processes; at least one worker.
        settings: the timeouts.
        now: seconds, on the clock that all later calls use.
        pausing: when processes pause after a loss.
    """

    def __init__(
        self,
        names: Sequence[ProcessName],
        settings: SupervisionSettings,
        now: float,
        pausing: Pausing = Pausing.NEVER,
    ) -> None:
        self._settings = settings
        self._pausing = pausing
        self._processes = JobProcesses(names)
        self._clock = _Clock(now)
        self._look_s = 0.0
        self.state = JobState.STARTING
        workers = [worker.name for worker in self._processes.workers]
        self._exchanges = AddressExchanges(workers, self._processes.shards)
        self._positions = LoopPositions()
        self._requests = UserRequests()
        self._causes = Causes()
        self._shutdown = JobShutdown(settings.grace_s)
        self._pause = Pause()

    @property
    def all_ready(self) -> bool:
        """Whether every shard listens and every worker has loaded what it needs."""
        return not self._processes.unready

    @property
    def paused(self) -> dict[ProcessName, events.Paused]:
        """The processes that have paused and wait for the next start, once this one has ended; none
        where it has failed.
        """
        if self._shutdown.begun or self.state is not JobState.ENDED:
            return {}
        running = self._processes.running
        return {one.name: one.paused for one in running if one.paused is not None}

    @property
    def unfinished_stop(self) -> SignalReceived | None:
        """The request to stop that the next start has to follow, because this one has regrouped
        first; None: there is none.
        """
        return self._requests.unfinished(self._clock.now) if self._pause.begun else None

    @property
    def result(self) -> JobResult:
        """The result of a job that ended without an error."""
        stop = self._requests.stop
        outcome = Outcome.FINISHED if stop is None else Outcome.STOPPED
        return JobResult(
            outcome=Outcome.REGROUPED if self._pause.begun else outcome,
            iteration=self._processes.workers[0].iteration,
            exit_code=0 if stop is None else stop.exit_code,
        )

    @property
    def error(self) -> JobError | None:
        """The job's error: one sentence and an exit code; None while there is no cause."""
        failed = self._shutdown.begun
        return self._causes.error(
            self._processes.iteration,
            continues=not failed,
            left=self._processes.running if failed and self.state is JobState.ENDED else (),
        )

    def handle(self, event: JobEvent, now: float) -> list[Action]:
        """Handle one event; return the actions to take.

        Args:
            event: what has happened.
            now: seconds, never less than at the call before.
        """
        now = self._clock.run(now)
        actions: list[Action] = []
        if isinstance(event, ProcessStarted):
            self._pause.add(self._processes.start(event.name, event.pid, now))
        elif isinstance(event, ProcessStartFailed):
            self._causes.ended_by_user |= event.killed_by_user
            self._fail(Cause(rank=CauseRank.ROOT, sentence=event.message, remedy=Remedy.RETRY), now)
        elif isinstance(event, ProcessReported):
            self._report(self._processes.by_name[event.name], event.event, now)
        elif isinstance(event, ProcessExited):
            self._exit(self._processes.by_name[event.name], event, now)
        elif isinstance(event, SignalReceived):
            actions += self._signal(event, now)
        elif isinstance(event, RegroupRequested):
            actions += self._request_regroup()
        if now >= self._look_s or isinstance(event, Tick):
            self._look_s = now + LOOK_S
            self._check_deadlines(now)
            self._pause.look()
        return actions + self._advance(now)

    def _report(self, process: ProcessState, event: events.Event, now: float) -> None:
        process.reported_s = now
        if not isinstance(event, events.Alive | events.Paused | events.Failed):
            self._processes.note_ready(process)
        if isinstance(event, events.Bound | events.Connecting):
            self._exchanges.take(process.name, event)
        elif isinstance(event, events.Alive):
            process.moved_s = None if event.still_s is None else now - event.still_s
            if event.position is not None and event.position != process.position:
                process.position = event.position
                self._fail_for(self._positions.move(process.name.index, event.position), now)
        elif isinstance(event, events.Progress | events.Saved):
            # one may be saved late
            process.iteration = max(event.iteration, process.iteration or 0)
            process.saved |= isinstance(event, events.Saved)
        elif isinstance(event, events.Paused):
            self._take_pause(process, event, now)
        elif isinstance(event, events.Done):
            process.finish_by_s = now + self._settings.finish_timeout_s
            self._exchanges.end(process.name)
            if not event.joined:
                self._fail_for(self._positions.end_without_joining(process.name.index), now)
        elif isinstance(event, events.Failed):
            process.explained = True
            self._causes.ended_by_user |= event.killed_by_user
            self._fail(reported(event), now)

    def _take_pause(self, process: ProcessState, event: events.Paused, now: float) -> None:
        process.paused = event
        self._pause.remove(process.name)
        if self.state not in (JobState.STARTING, JobState.RUNNING):
            return
        if event.regrouped and self._pausing is not Pausing.NEVER:
            self.state = JobState.PAUSING
            self._pause.begin(now)
            return
        why = event.message or f"{process.label} has paused by itself"
        self._fail(Cause(rank=CauseRank.PEER_LOST, sentence=why, remedy=Remedy.RESTART), now)

    def _fail_for(self, sentence: str | None, now: float) -> None:
        """Fail a job of a script whose workers wait for each other for ever."""
        if sentence is not None:
            self._fail(Cause(rank=CauseRank.OWN_ERROR, sentence=sentence), now)

    def _exit(self, process: ProcessState, exited: ProcessExited, now: float) -> None:
        process.status = exited.status
        self._pause.remove(process.name)
        ended_well = exited.status == 0 and process.finish_by_s is not None
        if not (ended_well or process.explained):
            was_ready = process.ready or self._pausing is Pausing.ALWAYS
            self._fail(ended_early(process, exited, was_ready=was_ready), now)

    def _signal(self, signal: SignalReceived, now: float) -> list[Action]:
        stops = signal.effect is SignalEffect.STOP
        if signal.effect is SignalEffect.SNAPSHOT and self.state is JobState.RUNNING:
            return self._send_first("snapshot")
        self._causes.ended_by_user |= stops
        if not stops or self.state in (JobState.FINISHING, JobState.PAUSING, JobState.ENDED):
            return []
        if self.state is JobState.FAILING:
            self._shutdown.hurry(now)
            return []
        pauses_always, first = self._pausing is Pausing.ALWAYS, self._requests.stop is None
        if self.state is JobState.STARTING and not pauses_always:
            self._fail(stopped("the job was stopped before it had started", signal.exit_code), now)
            return []
        iterate_by_s = math.inf if pauses_always else now + FIRST_ITERATION_S
        if self._requests.take_stop(signal, self._clock.now, iterate_by_s):
            what = lost(self._processes.workers)
            how = f"the job was ended at once by a second request to stop; {what}"
            self._fail(stopped(how), now)
            self._shutdown.hurry(now)
            return []
        return self._forward_requests() if first else []

    def _request_regroup(self) -> list[Action]:
        begun = self.state in (JobState.STARTING, JobState.RUNNING)
        if self._pausing is Pausing.NEVER or self._requests.stop is not None or not begun:
            return []
        self._requests.regroup = True
        return self._forward_requests()

    def _forward_requests(self) -> list[Action]:
        """Send worker 0 the request that it has to forward, once the job runs."""
        do = self._requests.command
        return self._send_first(do) if do and self.state is JobState.RUNNING else []

    def _send_first(self, do: str) -> list[Action]:
        return [SendLine(name=self._processes.workers[0].name, line=encode_command(do))]

    def _check_deadlines(self, now: float) -> None:
        if self.state in (JobState.PAUSING, JobState.FAILING, JobState.ENDED):
            return
        workers, term_s = self._processes.workers, self._settings.term_deadline_s
        if (cause := self._requests.overdue(workers, term_s, now, self._clock.now)) is not None:
            self._fail(cause, now)
            return
        for process in self._processes.running:
            if (cause := overdue(process, self._settings, now)) is not None:
                self._fail(cause, now)

    def _fail(self, cause: Cause, now: float) -> None:
        wait_s = 0.0 if cause.rank is CauseRank.ROOT else self._settings.collect_s
        if self.state is JobState.ENDED:
            return
        if self._pauses_after(cause):
            self._causes.known.append(cause)
            self.state = JobState.PAUSING
            self._pause.begin(now)
            return
        self.state = JobState.FAILING
        if self._shutdown.waits:
            self._causes.known.append(cause)
            self._shutdown.begin(now + wait_s)

    def _pauses_after(self, cause: Cause) -> bool:
        """Return whether the processes that are left pause after a cause."""
        if cause.remedy is Remedy.NONE or self._causes.ended_by_user:
            return False
        if self.state is JobState.STARTING:
            return self._pausing is Pausing.ALWAYS
        running = self.state in (JobState.RUNNING, JobState.PAUSING)
        return running and self._pausing is not Pausing.NEVER

    def _advance(self, now: float) -> list[Action]:
        """Make the transitions that are due; return their actions."""
        actions: list[Action] = []
        if self.state in (JobState.STARTING, JobState.RUNNING):
            actions += self._connect(now)
        workers = self._processes.workers
        if self.state is JobState.RUNNING and all(worker.status == 0 for worker in workers):
            self.state = JobState.FINISHING
            actions += self._stop_shards(now)
        if self.state is JobState.PAUSING:
            actions += self._pause.advance(self._causes, now)
            if self._pause.over:
                self.state = JobState.ENDED
        if (step := self._shutdown.step(now)) is not None:
            actions += [step(name=process.name) for process in self._processes.running]
        ends = self.state in (JobState.FINISHING, JobState.FAILING)
        if ends and (self._processes.ended or self._shutdown.given_up(now)):
            self.state = JobState.ENDED
        return actions

    def _connect(self, now: float) -> list[Action]:
        """Send the addresses once they are known; the job runs when all are ready, or a worker
        trains.
        """
        if self._processes.unstarted:
            return []
        # Once a worker trains a stop takes a snapshot first.
        requests = []
        if self.state is JobState.STARTING and (
            self.all_ready or any(one.iteration is not None for one in self._processes.workers)
        ):
            self.state = JobState.RUNNING
            requests = self._forward_requests()
        self._fail_for(self._exchanges.mismatch(), now)
        return [*self._exchanges.lines(), *requests]

    def _stop_shards(self, now: float) -> list[Action]:
        shards = self._processes.shards
        for name in shards:
            self._processes.by_name[name].finish_by_s = now + self._settings.finish_timeout_s
        return [SendLine(name=name, line=encode_command("stop")) for name in shards]
