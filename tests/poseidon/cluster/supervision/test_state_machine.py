"""The life of a job on a hand-moved clock: every transition, every cause, every deadline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from poseidon.base.call_names import LoopPosition
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
)
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.state import (
    Action,
    JobEvent,
    JobState,
    Kill,
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
    Terminate,
    Tick,
)
from poseidon.cluster.supervision.state_machine import FIRST_ITERATION_S, JobStateMachine
from poseidon.errors import JobInterrupted

SHARD = ProcessName(role=Role.SHARD, index=0, client=0, host="127.0.0.1")
WORKER_0 = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
WORKER_1 = ProcessName(role=Role.WORKER, index=1, client=1, host="node1")
ALL = (SHARD, WORKER_0, WORKER_1)
STOP = SignalReceived(effect=SignalEffect.STOP)
SNAPSHOT = SignalReceived(effect=SignalEffect.SNAPSHOT)


class Job:
    """A state machine and its clock."""

    def __init__(
        self,
        names: tuple[ProcessName, ...] = ALL,
        pausing: Pausing = Pausing.NEVER,
        **settings: float,
    ) -> None:
        defaults = {
            "start_timeout_s": 20.0,
            "stall_timeout_s": 10.0,
            "grace_s": 3.0,
            "collect_s": 0.5,
            "finish_timeout_s": 5.0,
        }
        self.now = 1000.0
        self.names = names
        self.machine = JobStateMachine(
            names,
            SupervisionSettings(**{**defaults, **settings}),  # type: ignore[arg-type]
            self.now,
            pausing,
        )

    def take(self, *events: JobEvent) -> list[Action]:
        actions = []
        for event in events:
            actions += self.machine.handle(event, self.now)
        return actions

    def hear(self, name: ProcessName, event: Event) -> list[Action]:
        return self.take(ProcessReported(name=name, event=event))

    def exit(self, name: ProcessName, status: int, last_line: str = "") -> list[Action]:
        return self.take(ProcessExited(name=name, status=status, last_line=last_line))

    def wait(self, seconds: float, alive: tuple[ProcessName, ...] = ()) -> list[Action]:
        """Let time pass in steps of a quarter second; `alive` send heartbeats."""
        actions = []
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            for name in alive:
                actions += self.hear(name, Alive())
            actions += self.take(Tick())
        return actions

    def start(self) -> Job:
        for pid, name in enumerate(self.names, start=100):
            self.take(ProcessStarted(name=name, pid=pid))
        return self

    def run(self) -> Job:
        self.start()
        self.hear(SHARD, Bound(address="tcp://127.0.0.1:5"))
        self.hear(WORKER_0, Ready())
        self.hear(WORKER_1, Ready())
        assert self.state is JobState.RUNNING
        return self

    @property
    def state(self) -> JobState:
        return self.machine.state

    @property
    def error(self) -> str:
        assert self.machine.error is not None
        return str(self.machine.error)


def commands(actions: list[Action]) -> list[tuple[str, object]]:
    return [(a.name.short, json.loads(a.line)) for a in actions if isinstance(a, SendLine)]


def connect_to(*addresses: str, number: int = 0, among: str = "job") -> dict[str, object]:
    return {"do": "connect", "addresses": list(addresses), "round": number, "among": among}


def terminated(actions: list[Action]) -> list[str]:
    return [a.name.short for a in actions if isinstance(a, Terminate)]


def killed(actions: list[Action]) -> list[str]:
    return [a.name.short for a in actions if isinstance(a, Kill)]


def test_a_good_job() -> None:
    job = Job().start()
    connect = connect_to("tcp://127.0.0.1:5")
    assert job.hear(WORKER_0, Ready()) == []
    assert commands(job.hear(SHARD, Bound(address="tcp://127.0.0.1:5"))) == [
        ("worker 0", connect),
        ("worker 1", connect),
    ]
    assert job.state is JobState.STARTING
    assert job.hear(WORKER_1, Ready()) == []
    assert job.state is JobState.RUNNING
    job.hear(WORKER_0, Progress(iteration=120))
    assert job.wait(60, alive=ALL) == []
    assert job.hear(WORKER_0, Done()) + job.exit(WORKER_0, 0) + job.hear(WORKER_1, Done()) == []
    assert job.state is JobState.RUNNING
    assert commands(job.exit(WORKER_1, 0)) == [("shard 0", {"do": "stop"})]
    assert job.state is JobState.FINISHING
    assert job.exit(SHARD, 0) == []
    assert job.state is JobState.ENDED
    assert job.machine.error is None
    assert (job.machine.result.outcome, job.machine.result.exit_code) == (Outcome.FINISHED, 0)
    assert job.machine.result.iteration == 120


def test_workers_are_not_connected_before_all_have_started() -> None:
    job = Job()
    job.take(ProcessStarted(name=SHARD, pid=100))
    assert job.hear(SHARD, Bound(address="a")) == []
    assert job.take(ProcessStarted(name=WORKER_0, pid=101)) == []
    assert len(commands(job.take(ProcessStarted(name=WORKER_1, pid=102)))) == 2


def test_a_worker_that_trains_makes_a_running_job() -> None:
    job = Job().start()
    job.hear(SHARD, Bound(address="a"))
    job.hear(WORKER_0, Progress(iteration=1))
    assert job.state is JobState.RUNNING
    assert commands(job.take(STOP)) == [("worker 0", {"do": "stop"})]
    job.wait(20, alive=(SHARD, WORKER_0))
    assert "worker 1 (client 1, node1, pid 102) was not ready within 20 s" in job.error


@pytest.mark.parametrize("runs", [False, True])
def test_without_shards_the_workers_addresses_go_to_all_whenever_they_come(runs: bool) -> None:
    job = Job((WORKER_0, WORKER_1)).start()
    job.hear(WORKER_0, Ready())
    if runs:
        assert job.hear(WORKER_1, Ready()) == []
        assert job.state is JobState.RUNNING
    connect = connect_to("a", "b")
    job.hear(WORKER_1, Bound(address="b"))
    actions = job.hear(WORKER_0, Bound(address="a"))
    assert commands(actions) == [("worker 0", connect), ("worker 1", connect)]
    assert job.wait(5, alive=(WORKER_0, WORKER_1)) == []


def test_the_shards_listen_once_more_for_a_later_exchange_of_addresses() -> None:
    job = Job().run()
    second = AddressRound(number=1)
    assert commands(job.hear(WORKER_1, Connecting(round=second))) == [
        ("shard 0", {"do": "listen", "round": 1})
    ]
    assert job.hear(WORKER_0, Connecting(round=second)) == []
    connect = connect_to("tcp://127.0.0.1:6", number=1)
    assert commands(job.hear(SHARD, Bound(address="tcp://127.0.0.1:6", round=second))) == [
        ("worker 0", connect),
        ("worker 1", connect),
    ]
    assert job.wait(5, alive=ALL) == []


def test_without_shards_all_workers_listen() -> None:
    others = [
        ProcessName(role=Role.WORKER, index=rank, client=client, host="node1")
        for rank, client in ((1, 0), (2, 1))
    ]
    job = Job((WORKER_0, *others))
    for pid, name in enumerate(job.names, start=100):
        job.take(ProcessStarted(name=name, pid=pid))
    for number in range(2):
        at = AddressRound(number=number)
        if number:
            assert job.hear(others[0], Connecting(round=at)) == []
        assert job.hear(others[1], Bound(address=f"c{number}", round=at)) == []
        assert job.hear(others[0], Bound(address=f"b{number}", round=at)) == []
        connect = connect_to(f"a{number}", f"b{number}", f"c{number}", number=number)
        actions = job.hear(WORKER_0, Bound(address=f"a{number}", round=at))
        assert commands(actions) == [(f"worker {rank}", connect) for rank in range(3)]


@pytest.mark.parametrize("names", [ALL, (WORKER_0, WORKER_1)])
def test_workers_exchange_their_own_addresses(names: tuple[ProcessName, ...]) -> None:
    job = Job(names).start()
    first = AddressRound(among=Among.WORKERS)
    assert job.hear(WORKER_1, Bound(address="b", round=first)) == []
    connect = connect_to("a", "b", among="workers")
    assert commands(job.hear(WORKER_0, Bound(address="a", round=first))) == [
        ("worker 0", connect),
        ("worker 1", connect),
    ]


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_worker_that_waits_for_one_that_has_ended_fails_the_job(ends_first: bool) -> None:
    job = Job((WORKER_0, WORKER_1)).start()
    events = [
        (WORKER_1, Bound(address="b", round=AddressRound(among=Among.WORKERS))),
        (WORKER_0, Done()),
    ]
    for name, event in reversed(events) if ends_first else events:
        job.hear(name, event)
    assert job.state is JobState.FAILING
    assert "worker 1 begins a collective of torch.distributed, but worker 0 has ended" in job.error


@pytest.mark.parametrize(
    ("name", "status", "last", "told"),
    [
        (WORKER_1, -9, "", "pid 102) was killed by signal 9 (SIGKILL)"),
        (SHARD, -11, "", "pid 100) was killed by signal 11 (SIGSEGV)"),
        (WORKER_1, -6, "no threads", "pid 102) was killed by signal 6 (SIGABRT)"),
        (WORKER_1, 3, "", "pid 102) exited with status 3"),
        (WORKER_1, 1, "Error: x", "pid 102) exited with status 1"),
        (SHARD, 0, "", "pid 100) ended before its work was done"),
    ],
)
def test_an_exit_before_its_time(name: ProcessName, status: int, last: str, told: str) -> None:
    job = Job().run()
    job.hear(name, Progress(iteration=120))
    actions = job.exit(name, status, last) + job.wait(0.5, alive=ALL)
    assert job.state is JobState.FAILING
    assert terminated(actions) == [other.short for other in ALL if other is not name]
    for other in ALL:
        if other is not name:
            job.exit(other, -15)
    assert job.state is JobState.ENDED
    assert job.error.startswith(f"{name.short} (client {name.client}, {name.host}, {told}")
    assert ", last seen at iteration 120" in job.error
    assert (f"its last line: {last!r}" in job.error) is bool(last)


def test_a_snapshot_shows_the_iteration_too() -> None:
    """It may be complete before its iteration is reported, or long after."""
    job = Job().run()
    assert job.machine.result.iteration is None
    job.hear(WORKER_0, Progress(iteration=6))
    job.hear(WORKER_0, Saved(iteration=10))
    assert job.machine.result.iteration == 10
    job.hear(WORKER_0, Progress(iteration=16))
    job.hear(WORKER_0, Saved(iteration=12))
    assert job.machine.result.iteration == 16


def test_an_exit_while_starting() -> None:
    job = Job().start()
    job.exit(WORKER_0, -4)
    assert "was killed by signal 4 (SIGILL) while it was starting" in job.error


def test_what_does_not_obey_is_killed_after_the_grace() -> None:
    job = Job().run()
    job.exit(WORKER_1, -9)
    assert killed(job.wait(2.75)) == []
    assert killed(job.wait(0.25)) == ["shard 0", "worker 0"]
    job.exit(SHARD, -9)
    assert job.state is JobState.FAILING
    job.wait(10)
    assert job.state is JobState.ENDED
    assert job.error.endswith("; these did not end: worker 0 (client 0, 127.0.0.1, pid 101)")


def test_of_many_processes_that_do_not_end_some_are_named() -> None:
    names = tuple(
        ProcessName(role=Role.WORKER, index=rank, client=rank, host=f"n{rank}")
        for rank in range(1000)
    )
    job = Job(names).start()
    for name in names:
        job.hear(name, Ready())
    job.exit(names[0], -9)
    job.wait(14)
    assert job.error.endswith("worker 8 (client 8, n8, pid 108) and 991 more")
    assert "worker 9" not in job.error


def test_a_process_tells_its_own_error() -> None:
    job = Job().run()
    failed = Failed(
        message="net.prototxt:3: unknown field 'kernal_size'", exit_code=2, peer_lost=False
    )
    assert job.hear(WORKER_0, failed) == []
    job.exit(WORKER_0, 2)
    assert terminated(job.wait(0.5)) == ["shard 0", "worker 1"]
    assert job.error == "net.prototxt:3: unknown field 'kernal_size'"
    assert job.machine.error is not None
    assert job.machine.error.exit_code == 2


LOST = Failed(message="worker 0 lost its connection to shard 0", exit_code=1, peer_lost=True)
OWN = Failed(message="the disk is full", exit_code=1, peer_lost=False)
KILLED_THERE = Failed(
    message="node1: the job was killed there; the job was stopped",
    exit_code=1,
    peer_lost=False,
    host_lost=True,
    killed_by_user=True,
)
HOST = Failed(
    message="ml@node1: the line to it has ended", exit_code=1, peer_lost=False, host_lost=True
)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([ProcessReported(name=WORKER_0, event=LOST), ProcessExited(name=SHARD, status=-9)], "shard 0 (client 0, 127.0.0.1, pid 100) was"),
        ([ProcessReported(name=WORKER_0, event=LOST), ProcessReported(name=WORKER_1, event=OWN)], "the disk is full"),
        ([ProcessExited(name=WORKER_0, status=1), ProcessReported(name=WORKER_1, event=OWN)], "the disk is full"),
        ([ProcessReported(name=WORKER_0, event=LOST), ProcessExited(name=WORKER_0, status=1)], "worker 0 lost its connection"),
        ([ProcessReported(name=WORKER_0, event=LOST), ProcessExited(name=WORKER_1, status=7)], "worker 1 (client 1, node1, pid 102) exited"),
        ([ProcessExited(name=SHARD, status=-9), ProcessReported(name=WORKER_1, event=OWN)], "shard 0"),
        ([ProcessReported(name=WORKER_0, event=LOST), ProcessReported(name=WORKER_1, event=HOST)], "ml@node1: the line"),
    ],
)  # fmt: skip
def test_the_cause_nearest_to_the_root_is_told(inputs: list[JobEvent], words: str) -> None:
    job = Job().run()
    job.take(*inputs)
    job.wait(1)
    assert job.error.startswith(words)


def test_silence_is_a_failure() -> None:
    job = Job().run()
    job.hear(WORKER_1, Progress(iteration=7))
    assert terminated(job.wait(9.75, alive=(SHARD, WORKER_0))) == []
    assert len(terminated(job.wait(0.25, alive=(SHARD, WORKER_0)))) == 3
    assert "pid 102) has sent no heartbeat for 10 s (last seen at iteration 7); " in job.error


def test_loading_may_be_silent_but_not_for_ever() -> None:
    job = Job().start()
    job.hear(SHARD, Bound(address="a"))
    job.hear(WORKER_0, Ready())
    assert job.wait(19.75, alive=(SHARD, WORKER_0))[1:] == []
    assert len(terminated(job.wait(0.25, alive=(SHARD, WORKER_0)))) == 3
    assert "worker 1 (client 1, node1, pid 102) was not ready within 20 s" in job.error


def test_a_pause_of_the_launcher_is_not_silence() -> None:
    job = Job().run()
    job.now += 3600
    assert job.take(Tick()) == []
    assert job.wait(8.75) == []
    assert len(terminated(job.wait(0.25))) == 3


@pytest.mark.parametrize("pause_s", [2.0, 12.0, 300.0])
def test_a_launcher_that_is_always_late_finds_a_silence_and_no_other(pause_s: float) -> None:
    job = Job().run()
    for _ in range(50):  # heartbeats come every two seconds, and are taken when it runs
        job.now += pause_s
        assert [job.hear(name, Alive()) for name in ALL] == [[], [], []]
        assert job.take(Tick()) == []
    for _ in range(9):
        job.now += pause_s
        assert [job.hear(name, Alive()) for name in (SHARD, WORKER_0)] == [[], []]
        assert job.take(Tick()) == []
    job.now += pause_s
    assert len(terminated(job.take(Tick()))) == 3
    assert job.error.startswith("worker 1 (client 1, node1, pid 102) has sent no heartbeat for 10")


def test_a_worker_that_is_done_must_end() -> None:
    job = Job().run()
    job.hear(WORKER_0, Done())
    job.wait(5, alive=ALL)
    assert "worker 0 (client 0, 127.0.0.1, pid 101) did not end within 5 s of fin" in job.error


def test_a_shard_that_does_not_stop() -> None:
    job = Job().run()
    for worker in (WORKER_0, WORKER_1):
        job.hear(worker, Done())
        job.exit(worker, 0)
    assert terminated(job.wait(5, alive=ALL)) == ["shard 0"]
    assert job.error.startswith("shard 0")


def test_not_started() -> None:
    job = Job()
    job.take(ProcessStarted(name=SHARD, pid=100))
    assert terminated(
        job.take(ProcessStartFailed(name=WORKER_0, message="cannot start worker 0"))
    ) == ["shard 0"]
    job.exit(SHARD, -15)
    assert (job.state, job.error) == (JobState.ENDED, "cannot start worker 0")


def test_requests() -> None:
    job = Job().run()
    assert commands(job.take(SNAPSHOT)) == [("worker 0", {"do": "snapshot"})]
    assert job.take(SignalReceived(effect=SignalEffect.NONE)) == []
    assert commands(job.take(STOP)) == [("worker 0", {"do": "stop"})]
    for worker in (WORKER_0, WORKER_1):
        job.hear(worker, Done())
        job.exit(worker, 0)
    assert job.take(STOP, SNAPSHOT) == []
    job.exit(SHARD, 0)
    assert job.state is JobState.ENDED
    assert job.machine.result.outcome is Outcome.STOPPED
    assert job.machine.result.exit_code == 130
    assert job.machine.error is None


def test_a_second_request_to_stop_kills_at_once() -> None:
    job = Job().run()
    job.take(STOP)
    assert killed(job.take(STOP)) == ["shard 0", "worker 0", "worker 1"]
    assert "second request to stop" in job.error


def test_a_request_to_stop_while_starting() -> None:
    job = Job().start()
    assert job.take(SNAPSHOT) == []
    assert len(terminated(job.take(SignalReceived(effect=SignalEffect.STOP, exit_code=143)))) == 3
    assert job.error == "the job was stopped before it had started"
    assert job.machine.error is not None
    assert job.machine.error.exit_code == 143
    assert len(killed(job.take(STOP))) == 3
    job = Job()  # there is no process to send the second to
    assert job.take(STOP) + job.take(STOP) == []
    assert (job.state, job.error) == (
        JobState.ENDED,
        "the job was stopped before it had started",
    )


def test_a_request_to_stop_ends_a_job_without_an_iteration() -> None:
    """A script may wait where no request reaches it: in a store of its own, or in `sleep`."""
    stop = SignalReceived(effect=SignalEffect.STOP, exit_code=143)
    job = Job().run()
    assert commands(job.take(stop)) == [("worker 0", {"do": "stop"})]
    assert len(terminated(job.wait(FIRST_ITERATION_S, alive=ALL))) == 3
    assert job.error == "the job was stopped before its first iteration"
    assert job.machine.error is not None
    assert job.machine.error.exit_code == 143


def test_a_request_to_stop_waits_for_a_job_with_an_iteration() -> None:
    job = Job().run()
    job.hear(WORKER_1, Progress(iteration=1))
    job.take(STOP)
    assert not job.wait(60.0, alive=ALL)
    assert job.state is JobState.RUNNING


def test_a_loop_that_hangs_ends_the_job_though_its_process_shows_life() -> None:
    job = Job().run()
    job.hear(WORKER_1, Progress(iteration=57))
    for second in range(40):
        job.hear(WORKER_0, Alive(still_s=0.0))
        job.hear(WORKER_1, Alive(still_s=second / 4))
        assert job.state is JobState.RUNNING
        job.wait(0.25, alive=(SHARD,))
    job.hear(WORKER_1, Alive(still_s=10.0))
    assert job.state is JobState.FAILING
    assert "worker 1 (client 1, node1, pid 102) hangs" in job.error


def test_scripts_that_can_never_meet_end_the_job_and_it_does_not_start_again() -> None:
    job = Job().run()
    job.hear(
        WORKER_1,
        Alive(position=LoopPosition(loop=None, iterations=7, collections=0, collection="")),
    )
    job.hear(WORKER_0, Alive())
    assert job.state is JobState.RUNNING
    job.hear(
        WORKER_0,
        Alive(position=LoopPosition(loop=None, iterations=6, collections=1, collection="mean")),
    )
    assert job.state is JobState.FAILING
    assert job.error.startswith("worker 0 waits in mean() after step 6")
    assert not isinstance(job.machine.error, JobInterrupted)


@pytest.mark.parametrize("ended_first", [True, False])
def test_a_script_that_ends_without_joining_ends_the_job_where_another_waits(
    ended_first: bool,
) -> None:
    job = Job().run()
    waits = (
        WORKER_0,
        Alive(
            position=LoopPosition(loop=None, iterations=0, collections=0, collection="distribute")
        ),
    )
    events = [(WORKER_1, Done(joined=False)), waits]
    (name, event), last = events if ended_first else events[::-1]
    job.hear(name, event)
    assert job.state is JobState.RUNNING
    job.hear(*last)
    assert job.state is JobState.FAILING
    assert "worker 0 waits in distribute(), but worker 1 has ended without calling it" in job.error
    assert not isinstance(job.machine.error, JobInterrupted)


def test_an_old_report_of_a_worker_that_waits_to_join_is_no_hang() -> None:
    """Worker 1 has joined and ended before the next heartbeat of worker 0."""
    job = Job().run()
    job.hear(
        WORKER_0,
        Alive(
            position=LoopPosition(loop=None, iterations=0, collections=0, collection="distribute")
        ),
    )
    job.hear(WORKER_1, Done())
    assert job.state is JobState.RUNNING


def test_a_slow_loop_is_no_hang() -> None:
    job = Job().run()
    for _ in range(20):
        job.hear(WORKER_1, Alive(still_s=9.0))
        job.wait(0.5, alive=(SHARD, WORKER_0))
        job.hear(WORKER_1, Alive(still_s=0.0))
        job.wait(5, alive=(SHARD, WORKER_0))
    assert job.state is JobState.RUNNING


TERM = SignalReceived(effect=SignalEffect.STOP, within_s=25.0)


@pytest.mark.parametrize("first", [TERM, STOP])
def test_sigterm_stops_with_a_snapshot_and_has_a_deadline(first: JobEvent) -> None:
    job = Job().run()
    job.hear(WORKER_0, Progress(iteration=1))
    assert commands(job.take(first)) == [("worker 0", {"do": "stop"})]
    assert job.take(TERM) == []  # a scheduler may say it again
    assert not terminated(job.wait(24.5, alive=ALL))
    assert job.state is JobState.RUNNING
    assert terminated(job.wait(1, alive=ALL)) == ["shard 0", "worker 0", "worker 1"]
    assert "the job did not end within 25 s of SIGTERM" in job.error


def killed_worker(job: Job) -> None:
    job.run().exit(WORKER_1, -9)


def silent_worker(job: Job) -> None:
    job.run().wait(11, alive=(SHARD, WORKER_0))


def lost_peer(job: Job) -> None:
    job.run().hear(WORKER_0, Failed(message="shard 0 has gone", exit_code=1, peer_lost=True))


def unreachable_peer(job: Job) -> None:
    job.run().hear(
        WORKER_0, Failed(message="no answer", exit_code=1, peer_lost=True, unreachable=True)
    )


def lost_host(job: Job) -> None:
    job.run().hear(WORKER_1, HOST)


def own_mistake(job: Job) -> None:
    job.run().hear(WORKER_0, Failed(message="the disk is full", exit_code=1, peer_lost=False))


def wish(job: Job) -> None:
    job.run().take(STOP, STOP)


def no_start(job: Job) -> None:
    job.take(ProcessStartFailed(name=WORKER_1, message="no route to node1"))


def slow_start(job: Job) -> None:
    job.start().wait(21)


def lost_after_a_request_to_stop(job: Job) -> None:
    job.run().take(TERM)
    job.exit(WORKER_1, -9)


def stopped_after_a_loss(job: Job) -> None:
    job.run().exit(WORKER_1, -9)
    job.take(TERM)


def killed_on_its_host(job: Job) -> None:
    job.run().hear(WORKER_1, KILLED_THERE)


def killed_there_after_a_loss(job: Job) -> None:
    job.run().exit(WORKER_0, -15)
    job.wait(2)
    job.hear(WORKER_1, KILLED_THERE)


def killed_there_while_starting(job: Job) -> None:
    job.take(
        ProcessStartFailed(
            name=WORKER_1, message="node1: the job was killed there", killed_by_user=True
        )
    )


def wrong_from_the_start(job: Job) -> None:
    job.start().exit(WORKER_1, 1, "ModuleNotFoundError: No module named 'torch'")


@pytest.mark.parametrize(
    ("what", "while_starting"),
    [
        (killed_worker, False),
        (silent_worker, False),
        (lost_peer, False),
        (unreachable_peer, True),
        (lost_host, False),
        (own_mistake, None),
        (wish, None),
        (no_start, True),
        (slow_start, True),
        (wrong_from_the_start, None),
        (lost_after_a_request_to_stop, None),
        (stopped_after_a_loss, None),
        (killed_on_its_host, None),
        (killed_there_after_a_loss, None),
        (killed_there_while_starting, None),
    ],
)
def test_only_what_was_lost_is_worth_a_new_start(
    what: Callable[[Job], None], while_starting: bool | None
) -> None:
    job = Job()
    what(job)
    error = job.machine.error
    assert error is not None
    assert (error.while_starting if isinstance(error, JobInterrupted) else None) == while_starting


PAUSE: dict[str, object] = {"do": "pause"}
PEER_LOST = Failed(message="lost worker 1", exit_code=1, peer_lost=True)
HOST_LOST = Failed(message="node1: gone", exit_code=1, peer_lost=False, host_lost=True)
KILLED_9 = "worker 1 (client 1, node1, pid 102) was killed by signal 9 (SIGKILL)"


def kill_worker_1(job: Job) -> list[Action]:
    return job.exit(WORKER_1, -9)


@pytest.mark.parametrize(
    ("lose", "asked", "sentence"),
    [
        (kill_worker_1, ["shard 0", "worker 0"], KILLED_9),
        (
            lambda job: job.exit(WORKER_1, 1, "x"),
            ["shard 0", "worker 0"],
            "worker 1 (client 1, node1, pid 102) exited with status 1, its last line: 'x'",
        ),
        (
            lambda job: job.hear(WORKER_1, HOST_LOST) + job.exit(WORKER_1, 1),
            ["shard 0", "worker 0", "worker 1"],
            "node1: gone",
        ),
    ],
)
def test_after_a_loss_the_others_pause(
    lose: Callable[[Job], list[Action]], asked: list[str], sentence: str
) -> None:
    job = Job(pausing=Pausing.RUNNING).run()
    job.hear(WORKER_0, Progress(iteration=7))
    assert commands(lose(job)) == [(name, PAUSE) for name in asked]
    assert job.state is JobState.PAUSING
    assert job.hear(SHARD, Paused()) == []
    assert job.machine.paused == {}
    assert job.hear(WORKER_0, Paused(snapshot=5)) == []
    assert job.state is JobState.ENDED
    assert job.machine.paused == {SHARD: Paused(), WORKER_0: Paused(snapshot=5)}
    assert job.error == sentence
    assert isinstance(job.machine.error, JobInterrupted)
    assert job.machine.error.iteration == 7


def test_a_worker_that_has_lost_a_peer_pauses_by_itself() -> None:
    job = Job(pausing=Pausing.RUNNING).run()
    lost = Paused(snapshot=5, message="worker 0 has lost worker 1")
    assert commands(job.hear(WORKER_0, lost)) == [("shard 0", PAUSE), ("worker 1", PAUSE)]
    job.hear(SHARD, Paused())
    job.exit(WORKER_1, -9)
    assert job.state is JobState.ENDED
    assert job.error == KILLED_9  # nearer to the root
    assert set(job.machine.paused) == {SHARD, WORKER_0}


@pytest.mark.parametrize(("silent_s", "limit_s"), [(0.0, 20.0), (8.0, 0.5)])
def test_a_process_that_does_not_pause_is_killed(silent_s: float, limit_s: float) -> None:
    job = Job((SHARD, WORKER_0, WORKER_1), Pausing.RUNNING).run()
    alive: tuple[ProcessName, ...] = (SHARD,) if silent_s else (SHARD, WORKER_1)
    job.wait(silent_s, alive)
    job.hear(WORKER_0, Paused(snapshot=5, message="lost"))
    job.hear(SHARD, Paused())
    assert killed(job.wait(limit_s - 0.25, alive)) == []
    assert killed(job.wait(0.25, alive)) == ["worker 1"]
    assert job.state is JobState.ENDED
    sentence = f"worker 1 (client 1, node1, pid 102) did not pause within {limit_s:g} s"
    assert job.error == sentence
    assert set(job.machine.paused) == {SHARD, WORKER_0}


OWN = Failed(message="the loss is not finite", exit_code=1, peer_lost=False)


@pytest.mark.parametrize(
    ("pausing", "act", "sentence"),
    [
        (Pausing.NEVER, kill_worker_1, f"{KILLED_9}; the job was stopped"),
        (
            Pausing.NEVER,
            lambda job: job.hear(WORKER_1, Paused(message="lost", regrouped=True)),
            "lost",
        ),
        (Pausing.RUNNING, lambda job: job.hear(WORKER_1, OWN), "the loss is not finite"),
        (
            Pausing.ALWAYS,
            lambda job: job.hear(WORKER_0, Paused(message="lost")) + job.hear(WORKER_1, OWN),
            "the loss is not finite",
        ),
        (Pausing.ALWAYS, lambda job: job.take(STOP) + job.exit(WORKER_1, -9), KILLED_9),
    ],
)
def test_what_ends_all_processes(
    pausing: Pausing, act: Callable[[Job], list[Action]], sentence: str
) -> None:
    job = Job(pausing=pausing).run()
    act(job)
    assert job.state is JobState.FAILING
    ended = terminated(job.wait(0.5))
    assert ended or job.machine.error is not None
    assert job.error.startswith(sentence)
    assert job.machine.paused == {}


@pytest.mark.parametrize(
    ("pausing", "state"), [(Pausing.RUNNING, JobState.FAILING), (Pausing.ALWAYS, JobState.PAUSING)]
)
def test_a_loss_at_the_start_pauses_those_that_have_something_to_keep(
    pausing: Pausing, state: JobState
) -> None:
    job = Job(pausing=pausing).start()
    asked = kill_worker_1(job)
    assert job.state is state
    assert len(commands(asked)) == (2 if state is JobState.PAUSING else 0)


def test_a_process_that_cannot_be_started_beside_some_that_go_on() -> None:
    job = Job(pausing=Pausing.ALWAYS)
    job.take(ProcessStarted(name=SHARD, pid=100), ProcessStarted(name=WORKER_0, pid=101))
    asked = job.take(ProcessStartFailed(name=WORKER_1, message="no route to node1"))
    assert commands(asked) == [("shard 0", PAUSE), ("worker 0", PAUSE)]
    job.hear(SHARD, Paused())
    job.hear(WORKER_0, Paused(snapshot=5))
    assert (job.state, job.error) == (JobState.ENDED, "no route to node1")


def test_regrouping_loses_nothing() -> None:
    job = Job(pausing=Pausing.RUNNING).run()
    assert commands(job.take(RegroupRequested())) == [("worker 0", {"do": "regroup"})]
    assert job.hear(WORKER_1, Paused(snapshot=8, regrouped=True)) == []
    assert job.state is JobState.PAUSING
    asked = job.hear(WORKER_0, Paused(snapshot=8, regrouped=True))
    assert commands(asked) == [("shard 0", PAUSE)]  # workers have needed it until now
    job.hear(SHARD, Paused())
    assert job.state is JobState.ENDED
    assert job.machine.error is None
    assert job.machine.result.outcome is Outcome.REGROUPED
    assert set(job.machine.paused) == set(ALL)


@pytest.mark.parametrize(("within_s", "left_s"), [(None, None), (25.0, 24.5)])
def test_a_stop_that_comes_after_a_request_to_regroup_is_for_the_next_start(
    within_s: float | None, left_s: float | None
) -> None:
    job = Job(pausing=Pausing.RUNNING).run()
    job.take(RegroupRequested())
    stop = SignalReceived(effect=SignalEffect.STOP, within_s=within_s)
    assert commands(job.take(stop)) == [("worker 0", {"do": "stop"})]
    assert job.machine.unfinished_stop is None
    job.now += 0.5
    for worker in (WORKER_0, WORKER_1):
        job.hear(worker, Paused(snapshot=8, regrouped=True))
    job.hear(SHARD, Paused())
    assert job.machine.result.outcome is Outcome.REGROUPED
    assert job.machine.unfinished_stop == replace(stop, within_s=left_s)


def test_a_loss_while_the_job_regroups() -> None:
    job = Job(pausing=Pausing.RUNNING).run()
    job.take(RegroupRequested())
    job.hear(WORKER_0, Paused(snapshot=8, regrouped=True))
    assert commands(job.exit(WORKER_1, -9)) == [("shard 0", PAUSE)]
    job.hear(SHARD, Paused())
    assert (job.state, job.error) == (JobState.ENDED, KILLED_9)


@pytest.mark.parametrize(("request_", "do"), [(RegroupRequested(), "regroup"), (STOP, "stop")])
def test_a_request_while_a_job_goes_on_from_memory_waits_until_it_runs(
    request_: JobEvent, do: str
) -> None:
    job = Job(pausing=Pausing.ALWAYS).start()
    assert job.take(request_) == []
    job.hear(SHARD, Bound(address="tcp://127.0.0.1:5"))
    job.hear(WORKER_0, Ready())
    assert commands(job.hear(WORKER_1, Ready())) == [("worker 0", {"do": do})]


@pytest.mark.parametrize("pausing", Pausing)
def test_a_job_that_ends_does_not_regroup(pausing: Pausing) -> None:
    job = Job(pausing=pausing).run()
    job.take(STOP)
    assert ("worker 0", {"do": "regroup"}) not in commands(job.take(RegroupRequested()))
