"""The state machine of a job: events in, actions out.

    STARTING --all shards listen, workers ready--> RUNNING --all workers done and gone--> FINISHING
        |                                             |                                     | all gone
        +---------------- a cause -------------------+--> FAILING --all gone--> ENDED <-----+
        +----- a loss, of a job whose processes pause +--> PAUSING --all paused-> ENDED

Workers get the addresses of the shards as soon as all are known; without shards the addresses of
all workers, where these listen. Later exchanges of addresses begin when a worker
takes part in one: each shard then listens at one more address.

Laws:
* Nothing here starts, signals, waits or reads a clock; `now` (seconds, monotonic) comes with every
  event.
* Any process that ends early, reports an error, or falls silent ends the whole job, and the job's
  error is the sentence of the cause nearest to the root (`CauseRank`).
* Where processes pause (`Pausing`) a loss ends this start of the job alone: the others are asked to
  pause, and who does not is killed. An error of a process's own, and a stop by the user, end all.
* From FAILING on, every process gets SIGTERM, then SIGKILL; the machine always reaches ENDED.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from poseidon.cluster.events import (
    AddressRound,
    Alive,
    Among,
    Bound,
    Connecting,
    Done,
    Event,
    Failed,
    Paused,
    Progress,
    Ready,
    Saved,
    encode_command,
)
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import describe_exit
from poseidon.cluster.supervision.positions import LoopPositions
from poseidon.cluster.supervision.state import (
    Action,
    Cause,
    CauseRank,
    JobEvent,
    JobState,
    Kill,
    Outcome,
    PauseState,
    Pausing,
    ProcessExited,
    ProcessReported,
    ProcessStarted,
    ProcessStartFailed,
    ProcessState,
    RegroupRequested,
    Remedy,
    SendLine,
    ShutdownState,
    SignalEffect,
    SignalReceived,
    SupervisionSettings,
    Terminate,
    Tick,
)
from poseidon.errors import JobError, JobInterrupted

# A longer pause between two events means that the launcher was late (a busy machine) or suspended
# (Ctrl-Z, a frozen terminal), not the processes: all deadlines move on by what it was longer. So a
# launcher that is always late finds every silence, too.
LONGEST_WAIT_S = 1.0
# After SIGKILL only the kernel can delay the end of a process (a dead disk or network file system).
GIVE_UP_S = 10.0
# A process that computes pauses between two of its steps, which may be long. One whose heartbeats
# (every two seconds) have stopped is lost, or as good as lost.
PAUSE_S = 20.0
SILENT_S = 6.0
SILENT_PAUSE_S = 0.5
# After a request to stop: a worker that has made no iteration may wait where no request reaches it,
# and there is nothing to keep. Heartbeats may be late.
FIRST_ITERATION_S = 4.0
LOOK_S = 0.05
"""The least time between two looks at the deadlines of all processes, save for ticks."""
MOST_NAMED = 8
"""Processes that a sentence names."""
THEN_STOPPED = "; the job was stopped"
"""The end of the sentence of a cause, unless the job continues with the processes that are left."""
FIRST = AddressRound()
"""The exchange of addresses for which the shards listen from their start."""


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
        self._processes = {name: ProcessState(name=name, reported_s=now) for name in names}
        self._workers = [self._processes[name] for name in names if name.role is Role.WORKER]
        self._shards = [self._processes[name] for name in names if name.role is Role.SHARD]
        self._listeners = self._shards or self._workers
        self._unstarted, self._unready = set(names), set(names)
        self._last_event_s = self._look_s = now
        self._start_by_s = now + settings.start_timeout_s
        self.state = JobState.STARTING
        self._addresses: dict[AddressRound, dict[ProcessName, str]] = {FIRST: {}}
        self._asked = {FIRST}  # exchanges of addresses for which the shards listen, or soon will
        self._connected: set[AddressRound] = set()
        self._positions = LoopPositions()
        self._some_are_done = False
        self._saved = False  # a snapshot, since its start
        self._stop: SignalReceived | None = None  # the request that it stops for
        self._ended_by_user = False
        self._stop_by_s = self._iterate_by_s = math.inf
        self._causes: list[Cause] = []
        self._shutdown: ShutdownState | None = None
        self._pause: PauseState | None = None
        self._live = dict.fromkeys(Role, 0)  # how many are still to pause, if the job does
        self._regroup_requested = False

    @property
    def all_ready(self) -> bool:
        """Whether every shard listens and every worker has loaded what it needs."""
        return not self._unready

    @property
    def outcome(self) -> Outcome:
        """The outcome of a job that ended without an error."""
        if self._pause is not None:
            return Outcome.REGROUPED
        return Outcome.FINISHED if self._stop is None else Outcome.STOPPED

    @property
    def paused(self) -> dict[ProcessName, Paused]:
        """The processes that have paused and wait for the next start, once this one has ended; none
        where it has failed.
        """
        if self._shutdown is not None or self.state is not JobState.ENDED:
            return {}
        return {
            process.name: process.paused
            for process in self._processes.values()
            if process.running and process.paused is not None
        }

    @property
    def exit_code(self) -> int:
        """The exit code of a job that ended without an error: 0 where it has finished, else the
        signal's.
        """
        return 0 if self._stop is None else self._stop.exit_code

    @property
    def unfinished_stop(self) -> SignalReceived | None:
        """The request to stop that the next start has to follow, because this one has regrouped
        first; None: there is none.
        """
        if self._stop is None or self.outcome is not Outcome.REGROUPED:
            return None
        left_s = self._stop_by_s - self._last_event_s
        return self._stop if left_s == math.inf else replace(self._stop, within_s=left_s)

    @property
    def iteration(self) -> int | None:
        """The last iteration that the first worker has reported; None before any."""
        return self._workers[0].iteration

    @property
    def _reached(self) -> int:
        """The last iteration that any worker has reported."""
        reported = (worker.iteration or 0 for worker in self._workers)
        beats = (worker.position.steps for worker in self._workers if worker.position)
        return max(itertools.chain(reported, beats))

    @property
    def error(self) -> JobError | None:
        """The job's error: one sentence and an exit code; None while there is no cause."""
        if not self._causes:
            return None
        cause = min(self._causes, key=lambda cause: cause.rank)
        if self._shutdown is None:
            return self._error(cause, cause.sentence.removesuffix(THEN_STOPPED))
        left = [process.label for process in self._processes.values() if process.running]
        names = ", ".join(left[:MOST_NAMED])
        names += f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        survivors = f"; these did not end: {names}" if left and self._ended() else ""
        error = self._error(cause, cause.sentence + survivors)
        error.exit_code, error.traceback = cause.exit_code, cause.traceback
        return error

    def _error(self, cause: Cause, sentence: str) -> JobError:
        if cause.remedy is Remedy.NONE:
            return JobError(sentence)
        if self._ended_by_user:
            return JobError(f"{sentence}; it is not started again, because the user has ended it")
        retry = cause.remedy is Remedy.RETRY
        return JobInterrupted(sentence, iteration=self._reached, while_starting=retry)

    def handle(self, event: JobEvent, now: float) -> list[Action]:
        """Handle one event; return the actions to take.

        Args:
            event: what has happened.
            now: seconds, never less than at the call before.
        """
        self._shift_deadlines(now)
        actions: list[Action] = []
        if isinstance(event, ProcessStarted):
            process = self._processes[event.name]
            process.pid, process.reported_s = event.pid, now
            self._unstarted.discard(event.name)
            self._note_pausing(process)
        elif isinstance(event, ProcessStartFailed):
            self._ended_by_user |= event.killed_by_user
            self._fail(Cause(rank=CauseRank.ROOT, sentence=event.message, remedy=Remedy.RETRY), now)
        elif isinstance(event, ProcessReported):
            self._report(self._processes[event.name], event.event, now)
        elif isinstance(event, ProcessExited):
            self._exit(self._processes[event.name], event, now)
        elif isinstance(event, SignalReceived):
            actions += self._signal(event, now)
        elif isinstance(event, RegroupRequested):
            actions += self._request_regroup()
        if now >= self._look_s or isinstance(event, Tick):
            self._look_s = now + LOOK_S
            self._check_deadlines(now)
            self._look_for_pauses()
        return actions + self._advance(now)

    def _report(self, process: ProcessState, event: Event, now: float) -> None:
        process.reported_s = now
        if isinstance(event, Bound):
            self._addresses.setdefault(event.round, {})[process.name] = event.address
            self._note_ready(process)
        elif isinstance(event, Connecting):
            self._addresses.setdefault(event.round, {})
            self._note_ready(process)
        elif isinstance(event, Ready):
            self._note_ready(process)
        elif isinstance(event, Alive):
            process.moved_s = None if event.still_s is None else now - event.still_s
            if event.position is not None and event.position != process.position:
                process.position = event.position
                self._fail_for(self._positions.move(process.name.index, event.position), now)
        elif isinstance(event, Progress | Saved):
            # one may be saved late
            process.iteration = max(event.iteration, process.iteration or 0)
            self._note_ready(process)
            self._saved |= isinstance(event, Saved)
        elif isinstance(event, Paused):
            self._take_pause(process, event, now)
        elif isinstance(event, Done):
            self._note_ready(process)
            self._some_are_done = True
            process.finish_by_s = now + self._settings.finish_timeout_s
            if not event.joined:
                self._fail_for(self._positions.end_without_joining(process.name.index), now)
        elif isinstance(event, Failed):
            process.explained = True
            rank = CauseRank.PEER_LOST if event.peer_lost else CauseRank.OWN_ERROR
            rank = CauseRank.ROOT if event.host_lost else rank
            remedy = Remedy.RESTART if event.peer_lost or event.host_lost else Remedy.NONE
            self._ended_by_user |= event.killed_by_user
            self._fail(
                Cause(
                    rank=rank,
                    sentence=event.message,
                    exit_code=event.exit_code,
                    remedy=remedy,
                    traceback=event.traceback,
                ),
                now,
            )

    def _note_ready(self, process: ProcessState) -> None:
        process.ready = True
        self._unready.discard(process.name)

    def _note_pausing(self, process: ProcessState) -> None:
        """Keep count of the processes that are to pause; look at them all once it matters."""
        role, counted, process.counted = process.name.role, process.counted, process.pausing
        self._live[role] += process.counted - counted
        if process.counted > counted or (role is Role.WORKER and not self._live[role]):
            self._look_for_pauses()

    def _look_for_pauses(self) -> None:
        if self._pause is not None:
            self._pause.due = True

    def _take_pause(self, process: ProcessState, event: Paused, now: float) -> None:
        process.paused = event
        self._note_pausing(process)
        if self.state not in (JobState.STARTING, JobState.RUNNING):
            return
        if event.regrouped and self._pausing is not Pausing.NEVER:
            self._begin_pause(now)
            return
        sentence = event.message or f"{process.label} has paused by itself"
        remedy = Remedy.RESTART
        self._fail(Cause(rank=CauseRank.PEER_LOST, sentence=sentence, remedy=remedy), now)

    def _fail_for(self, sentence: str | None, now: float) -> None:
        """Fail a job of a script whose workers wait for each other for ever."""
        if sentence is not None:
            self._fail(Cause(rank=CauseRank.OWN_ERROR, sentence=sentence), now)

    def _exit(self, process: ProcessState, exited: ProcessExited, now: float) -> None:
        process.status = exited.status
        self._note_pausing(process)
        ended_well = exited.status == 0 and process.finish_by_s is not None
        if ended_well or process.explained:
            return
        if exited.status < 0:
            rank, how = CauseRank.ROOT, describe_exit(exited.status) + process.when
        elif exited.status > 0:
            rank, how = CauseRank.UNEXPLAINED, describe_exit(exited.status) + process.when
        else:
            rank, how = CauseRank.UNEXPLAINED, f"ended before its work was done{process.when}"
        last = (
            f", its last line: '{exited.last_line}'"
            if exited.last_line and exited.status > 0
            else ""
        )
        # A process that ends by itself before it is ready would do so again, unless it has been
        # ready in an earlier start.
        lost = exited.status < 0 or process.ready or self._pausing is Pausing.ALWAYS
        self._fail_of(process, rank, how + last, now, Remedy.RESTART if lost else Remedy.NONE)

    def _signal(self, signal: SignalReceived, now: float) -> list[Action]:
        effect = signal.effect
        if effect is SignalEffect.SNAPSHOT and self.state is JobState.RUNNING:
            return [SendLine(name=self._workers[0].name, line=encode_command("snapshot"))]
        self._ended_by_user |= effect is SignalEffect.STOP
        settled = (JobState.FINISHING, JobState.PAUSING, JobState.ENDED)
        if effect is not SignalEffect.STOP or self.state in settled:
            return []
        if self.state is JobState.FAILING:
            return self._kill_all(now)
        if self.state is JobState.STARTING and self._pausing is not Pausing.ALWAYS:
            sentence = "the job was stopped before it had started"
            self._fail(
                Cause(rank=CauseRank.ROOT, sentence=sentence, exit_code=signal.exit_code), now
            )
            return []
        if signal.within_s is not None:
            self._stop_by_s = min(self._stop_by_s, now + signal.within_s)
        if self._stop is not None and signal.within_s is not None:
            return []  # it is under way, and has its deadline
        if self._stop is not None:
            sentence = f"the job was ended at once by a second request to stop; {self._lost}"
            self._fail(Cause(rank=CauseRank.ROOT, sentence=sentence), now)
            return self._kill_all(now)
        self._stop = signal
        if self._pausing is not Pausing.ALWAYS:
            self._iterate_by_s = now + FIRST_ITERATION_S
        return self._requests_to_workers() if self.state is JobState.RUNNING else []

    def _request_regroup(self) -> list[Action]:
        begun = self.state in (JobState.STARTING, JobState.RUNNING)
        if self._pausing is Pausing.NEVER or self._stop is not None or not begun:
            return []
        self._regroup_requested = True
        return self._requests_to_workers() if self.state is JobState.RUNNING else []

    def _requests_to_workers(self) -> list[Action]:
        """Return the request that worker 0 has to forward; one to stop precedes one to regroup."""
        if self._stop is None and not self._regroup_requested:
            return []
        line = encode_command("regroup" if self._stop is None else "stop")
        return [SendLine(name=self._workers[0].name, line=line)]

    @property
    def _lost(self) -> str:
        """What is lost at the end of a job that is not waited for."""
        return f"iterations since {'the last snapshot' if self._saved else 'its start'} are lost"

    def _check_deadlines(self, now: float) -> None:
        if self.state in (JobState.PAUSING, JobState.FAILING, JobState.ENDED):
            return
        settings = self._settings
        if now >= self._stop_by_s:
            sentence = f"the job did not end within {settings.term_deadline_s:g} s of SIGTERM; {self._lost}"
            self._fail(Cause(rank=CauseRank.ROOT, sentence=sentence), now)
            return
        if self._stop and now >= self._iterate_by_s and self.state is JobState.RUNNING:
            self._iterate_by_s = math.inf
            if all(worker.iteration is None for worker in self._workers):
                sentence = "the job was stopped before its first iteration"
                code = self._stop.exit_code
                self._fail(Cause(rank=CauseRank.ROOT, sentence=sentence, exit_code=code), now)
                return
        for process in [process for process in self._processes.values() if process.running]:
            silent_s = now - process.reported_s
            if not process.ready and now >= self._start_by_s:
                how = f"was not ready within {settings.start_timeout_s:g} s"
            elif process.finish_by_s is not None and now >= process.finish_by_s:
                how = f"did not end within {settings.finish_timeout_s:g} s of finishing its work"
            elif process.ready and silent_s >= settings.stall_timeout_s:
                how = f"has sent no heartbeat for {settings.stall_timeout_s:g} s{self._since(process)}"
            elif process.moved_s is not None and now - process.moved_s >= settings.stall_timeout_s:
                how = f"hangs: it has done nothing for {settings.stall_timeout_s:g} s{self._since(process)}"
            else:
                continue
            remedy = Remedy.RESTART if process.ready else Remedy.RETRY
            self._fail_of(process, CauseRank.ROOT, how, now, remedy)

    def _since(self, process: ProcessState) -> str:
        if process.iteration is None:
            return ""
        return f" (last seen at iteration {process.iteration})"

    def _fail_of(
        self,
        process: ProcessState,
        rank: CauseRank,
        how: str,
        now: float,
        remedy: Remedy = Remedy.RESTART,
    ) -> None:
        self._fail(
            Cause(rank=rank, sentence=f"{process.label} {how}{THEN_STOPPED}", remedy=remedy),
            now,
        )

    def _fail(self, cause: Cause, now: float) -> None:
        wait_s = 0.0 if cause.rank is CauseRank.ROOT else self._settings.collect_s
        if self.state is JobState.ENDED:
            return
        if self._pauses_after(cause):
            self._causes.append(cause)
            self._begin_pause(now)
            return
        if self._shutdown is None:
            self.state = JobState.FAILING
            self._shutdown = ShutdownState(terminate_at_s=now + wait_s)
        # After SIGTERM, reports and exits are its consequences.
        if self._shutdown.terminate_at_s is not None:
            self._causes.append(cause)
            self._shutdown.terminate_at_s = min(self._shutdown.terminate_at_s, now + wait_s)

    def _pauses_after(self, cause: Cause) -> bool:
        """Return whether the processes that are left pause after a cause."""
        if cause.remedy is Remedy.NONE or self._ended_by_user or self._pausing is Pausing.NEVER:
            return False
        if self.state is JobState.STARTING:
            return self._pausing is Pausing.ALWAYS
        return self.state in (JobState.RUNNING, JobState.PAUSING)

    def _begin_pause(self, now: float) -> None:
        self.state = JobState.PAUSING
        self._pause = self._pause or PauseState(began_s=now)
        self._look_for_pauses()

    def _pause_processes(self, now: float) -> list[Action]:
        """Ask processes to pause, and kill those that do not."""
        pause = self._pause
        assert pause is not None
        if not pause.due:
            return []
        pause.due = False
        waiting = [process for process in self._processes.values() if process.pausing]
        regroups = not self._causes and any(one.name.role is Role.WORKER for one in waiting)
        actions: list[Action] = []
        for process in waiting:
            silent = now - process.reported_s > SILENT_S
            limit_s = SILENT_PAUSE_S if silent else PAUSE_S
            if now - pause.began_s >= limit_s:
                process.given_up = pause.due = True
                self._note_pausing(process)
                sentence = f"{process.label} did not pause within {limit_s:g} s{process.when}"
                cause = Cause(rank=CauseRank.ROOT, sentence=sentence, remedy=Remedy.RESTART)
                self._causes.append(cause)
                actions.append(Kill(name=process.name))
            elif process.name not in pause.asked and not regroups:
                # workers that regroup pause by themselves, and need the shards until then
                pause.asked.add(process.name)
                actions.append(SendLine(name=process.name, line=encode_command("pause")))
        return actions

    def _advance(self, now: float) -> list[Action]:
        """Make the transitions that are due; return their actions."""
        actions: list[Action] = []
        if self.state in (JobState.STARTING, JobState.RUNNING):
            actions += self._connect(now)
        if self.state is JobState.RUNNING and all(worker.status == 0 for worker in self._workers):
            self.state = JobState.FINISHING
            actions += self._stop_shards(now)
        if self.state is JobState.PAUSING:
            actions += self._pause_processes(now)
            if not any(self._live.values()):
                self.state = JobState.ENDED
        if self.state is JobState.FAILING:
            actions += self._end_processes(now)
        if self.state in (JobState.FINISHING, JobState.FAILING) and self._ended():
            self.state = JobState.ENDED
        return actions

    def _connect(self, now: float) -> list[Action]:
        """Send the addresses once they are known; the job runs when all are ready, or a worker
        trains.
        """
        if self._unstarted:
            return []
        # Once a worker trains a stop takes a snapshot first.
        begins = self.state is JobState.STARTING and (
            self.all_ready or any(worker.iteration is not None for worker in self._workers)
        )
        if begins:
            self.state = JobState.RUNNING
        requests = self._requests_to_workers() if begins else []
        exchanges = [self._exchange_addresses(at, now) for at in self._addresses]
        return [*itertools.chain.from_iterable(exchanges), *requests]

    def _exchange_addresses(self, at: AddressRound, now: float) -> list[Action]:
        """Let the shards listen once more where needed; send the addresses once all are known."""
        if at in self._connected:
            return []
        actions: list[Action] = []
        if at.among is Among.WORKERS and self._some_are_done:
            self._check_all_can_take_part(at, now)
        if at.among is Among.JOB and at not in self._asked:
            self._asked.add(at)
            line = encode_command("listen", round=at.number)
            actions = [SendLine(name=shard.name, line=line) for shard in self._shards]
        listeners = self._workers if at.among is Among.WORKERS else self._listeners
        known = self._addresses[at]
        if len(known) >= len(listeners) and all(each.name in known for each in listeners):
            self._connected.add(at)
            addresses = [known[process.name] for process in listeners]
            line = encode_command(
                "connect", addresses=addresses, round=at.number, among=at.among.value
            )
            actions += [SendLine(name=worker.name, line=line) for worker in self._workers]
        return actions

    def _check_all_can_take_part(self, at: AddressRound, now: float) -> None:
        """Fail if a worker waits for the addresses of all, and another has ended without."""
        known = self._addresses[at]
        waiting = next((worker for worker in self._workers if worker.name in known), None)
        for worker in self._workers:
            if waiting and worker.name not in known and worker.finish_by_s is not None:
                sentence = (
                    f"worker {waiting.name.index} begins a collective of torch.distributed, but "
                    f"worker {worker.name.index} has ended without one; all workers must make the "
                    "same calls"
                )
                self._fail(Cause(rank=CauseRank.OWN_ERROR, sentence=sentence), now)
                return

    def _stop_shards(self, now: float) -> list[Action]:
        for shard in self._shards:
            shard.finish_by_s = now + self._settings.finish_timeout_s
        return [SendLine(name=shard.name, line=encode_command("stop")) for shard in self._shards]

    def _end_processes(self, now: float) -> list[Action]:
        shutdown = self._shutdown
        assert shutdown is not None
        if shutdown.terminate_at_s is not None and now >= shutdown.terminate_at_s:
            shutdown.terminate_at_s = None
            shutdown.kill_at_s = now + self._settings.grace_s
            return [Terminate(name=name) for name in self._running()]
        if shutdown.kill_at_s is not None and now >= shutdown.kill_at_s:
            return self._kill_all(now)
        return []

    def _kill_all(self, now: float) -> list[Action]:
        assert self._shutdown is not None
        self._shutdown.terminate_at_s = self._shutdown.kill_at_s = None
        self._shutdown.give_up_at_s = self._shutdown.give_up_at_s or now + GIVE_UP_S
        return [Kill(name=name) for name in self._running()]

    def _running(self) -> list[ProcessName]:
        return [process.name for process in self._processes.values() if process.running]

    def _ended(self) -> bool:
        if not any(process.running for process in self._processes.values()):
            return True
        give_up_at_s = self._shutdown.give_up_at_s if self._shutdown else None
        return give_up_at_s is not None and self._last_event_s >= give_up_at_s

    def _shift_deadlines(self, now: float) -> None:
        late_s = now - self._last_event_s - LONGEST_WAIT_S
        self._last_event_s = now
        if late_s <= 0.0:
            return
        self._start_by_s += late_s
        self._iterate_by_s += late_s
        if self._pause is not None:
            self._pause.began_s += late_s
        # `_stop_by_s` stays: the sender of SIGTERM does not wait longer.
        for process in self._processes.values():
            process.reported_s += late_s
            if process.moved_s is not None:
                process.moved_s += late_s
            if process.finish_by_s is not None:
                process.finish_by_s += late_s
