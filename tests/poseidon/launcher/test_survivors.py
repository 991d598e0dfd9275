"""What is left of a job after a loss: hosts and their order, and processes that go on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from poseidon.cluster.agent.messages import Exited, Request, SendSignal, Started, WriteLine
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.events import Paused
from poseidon.cluster.job_plan import JobPlan, ProcessName, Role, plan_job
from poseidon.cluster.machinefile import parse_machinefile
from poseidon.cluster.process import ProcessSpec
from poseidon.errors import JobError
from poseidon.launcher.survivors import PausedProcesses, find_survivors
from tests.support.recording_listener import RecordingListener

THREE = "0 a 0\n1 b 0\n2 c 0"


def plan_of(machinefile: str, workers: int = 1) -> JobPlan:
    devices = ("cpu",) * workers
    return plan_job(
        parse_machinefile(machinefile, source="hosts"), devices_per_host=devices, channels=1
    )


def paused(plan: JobPlan, workers: dict[int, int | None], shards: str) -> dict[ProcessName, Paused]:
    """Return the processes that have paused: workers with their snapshots, and shards."""
    named = {role.process.short: role.process for role in plan.roles}
    found = {named[f"worker {rank}"]: Paused(snapshot=at) for rank, at in workers.items()}
    return {**found, **{named[f"shard {index}"]: Paused() for index in shards}}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ({0: 8, 1: 8, 2: 8, 3: 8}, ([0, 1], 8, [])),
        ({0: 8, 1: None, 2: 8, 3: 8}, ([1, 0], 8, [])),  # a part is missing on the first host
        ({0: 8, 2: 8, 3: 8}, ([1], 8, [0])),  # with its worker
        ({0: 8, 1: 6, 2: 6, 3: 6}, ([0, 1], 8, [])),  # all have made the parts of 8
        ({0: 8, 2: 8}, None),  # no host has all parts
        ({0: 8, 2: 8, 3: None}, None),
    ],
)
def test_a_job_goes_on_from_the_parts_of_all_workers_of_a_host(
    workers: dict[int, int | None], expected: tuple[list[int], int, list[int]] | None
) -> None:
    plan = plan_of("0 a 0\n1 b 0", 2)
    of_workers = paused(plan, workers, "")
    parts = {
        name: replace(found, is_part=found.snapshot is not None)
        for name, found in of_workers.items()
    }
    found = find_survivors(plan, parts, min_workers=1)
    left = found and ([h.id for h in found.hosts], found.iteration, [h.id for h in found.lost])
    assert left == expected


@pytest.mark.parametrize(
    ("machinefile", "local", "workers", "shards", "expected"),
    [
        (THREE, 1, {0: 8, 1: 8}, "01", ([0, 1], 8, [2])),
        (THREE, 1, {1: 8, 2: None}, "12", ([1, 2], 8, [0])),  # the first host is lost
        (THREE, 1, {0: 6, 1: 8, 2: None}, "012", ([1, 0, 2], 8, [])),  # the newest snapshot
        (THREE, 1, {0: 8, 1: 8, 2: 8}, "", ([0, 1, 2], 8, [])),  # shards start anew
        (THREE, 1, {0: 8, 1: 8, 2: None}, "12", ([1, 2], 8, [0])),  # of the first they are lost
        (THREE, 1, {0: 8, 1: None, 2: None}, "12", ([0, 1, 2], 8, [])),  # which has the snapshot
        (THREE, 1, {2: None}, "2", None),
        (THREE, 1, {}, "012", None),
        (THREE, 2, {0: 8, 1: None, 2: 8, 3: None, 4: None}, "012", ([0, 1], 8, [2])),
        (THREE, 2, {0: 8, 2: 8, 3: None}, "012", ([1], 8, [0, 2])),  # a host with all its workers
        (THREE, 2, {0: 8, 4: None, 5: None}, "012", ([0, 2], 8, [1])),  # or the one that holds it
        (THREE, 2, {1: 8}, "012", None),  # not of the first worker of its host
        ("0 a 0 workers=2\n1 b 0", 1, {0: 8, 1: None, 2: 8}, "01", ([0, 1], 8, [])),
        ("0 a 0 workers=2\n1 b 0", 1, {0: 8, 2: 8}, "01", ([1], 8, [0])),
        ("0 a 0 workers=2\n1 b 0", 1, {0: 8, 1: None}, "01", ([0], 8, [1])),
        (
            "0 a 0 role=worker\n1 b 0 role=worker\n2 c 0 role=server",
            1,
            {1: 4},
            "0",
            ([1, 2], 4, [0]),
        ),
        (
            "0 a 0 role=server\n1 b 0\n2 c 0",
            1,
            {0: 4, 1: 4},
            "12",
            ([1, 2], 4, [0]),
        ),
    ],
)  # fmt: skip
def test_what_a_job_goes_on_with(
    machinefile: str,
    local: int,
    workers: dict[int, int | None],
    shards: str,
    expected: tuple[list[int], int, list[int]] | None,
) -> None:
    plan = plan_of(machinefile, local)
    found = find_survivors(plan, paused(plan, workers, shards), min_workers=1)
    if expected is None or found is None:
        assert found is expected
        return
    ids = [host.id for host in found.hosts], found.iteration, [host.id for host in found.lost]
    assert ids == expected


@pytest.mark.parametrize(
    ("machinefile", "workers", "least", "goes_on"),
    [
        (THREE, {0: 8, 1: 8}, 2, True),
        (THREE, {0: 8, 1: 8}, 3, False),
        ("0 a 0 workers=2\n1 b 0\n2 c 0", {0: 8, 1: None, 2: 8}, 3, True),
        ("0 a 0 workers=2\n1 b 0\n2 c 0", {2: 8, 3: 8}, 3, False),
    ],
)
def test_the_fewest_workers(
    machinefile: str, workers: dict[int, int | None], least: int, goes_on: bool
) -> None:
    plan = plan_of(machinefile)
    found = find_survivors(plan, paused(plan, workers, "012"), min_workers=least)
    assert (found is not None) is goes_on


@pytest.mark.parametrize(
    ("workers", "leaving", "least", "hosts"),
    [
        ({0: 8, 1: 8, 2: None}, {0}, 1, [1, 2]),
        ({0: 8, 1: 8, 2: None}, {0, 1}, 1, [0, 2]),  # one with a snapshot stays
        ({0: 6, 1: 8, 2: None}, {0, 1}, 1, [1, 2]),  # the newest
        ({0: 8, 1: 8, 2: None}, {1, 2}, 1, [0]),
        ({0: 8, 2: None}, {2}, 2, [0, 2]),  # another host was lost
        ({0: 8, 1: 8, 2: None}, {1, 2}, 2, [0, 1]),
        ({1: None, 2: None}, {1}, 1, None),
    ],
)
def test_hosts_leave_unless_the_others_cannot_go_on(
    workers: dict[int, int | None], leaving: set[int], least: int, hosts: list[int] | None
) -> None:
    plan = plan_of(THREE)
    shards = "".join(map(str, workers))
    found = find_survivors(
        plan, paused(plan, workers, shards), min_workers=least, leaving=frozenset(leaving)
    )
    assert (found and [host.id for host in found.hosts]) == hosts
    assert not found or {host.id for host in found.lost} == {0, 1, 2} - set(hosts or ())


OLD = ProcessName(role=Role.WORKER, index=1, client=1, host="b")
NEW = ProcessName(role=Role.WORKER, index=0, client=1, host="b")


def spec_of(name: ProcessName, slot: int = 0) -> ProcessSpec:
    return ProcessSpec(name=name, argv=("x",), first_line=b'{"rank": 0}', slot=slot)


class Rig:
    """A process that waits, and what was sent to it."""

    def __init__(self, name: ProcessName = OLD) -> None:
        self.sent: list[Request] = []
        self.before = RecordingListener()
        self.process = RemoteProcess(name, 7, "b", self.before, self.sent.append)
        self.process.take(Started(id=7, pid=70, created="1.0"))
        self.pool = PausedProcesses()
        self.pool.started(spec_of(name), self.process)
        self.pool.keep({name: Paused(snapshot=5)})
        assert self.pool


def test_a_process_goes_on_with_another_name_and_listener() -> None:
    rig, after = Rig(), RecordingListener()
    assert rig.pool.take(spec_of(NEW, slot=1), after) is None
    assert rig.pool.take(spec_of(NEW), after) is rig.process
    assert rig.process.name == NEW
    [line] = rig.sent
    assert isinstance(line, WriteLine)
    assert json.loads(line.line) == {"do": "go_on", "document": {"rank": 0}}
    rig.process.take(Exited(id=7, status=-9))
    assert after.until("exited") == [("exited", -9)]
    assert rig.before.received.empty()
    assert not rig.pool


def test_a_process_that_has_ended_while_it_waited_does_not_go_on() -> None:
    rig, after = Rig(), RecordingListener()
    rig.process.take(Exited(id=7, status=-9))
    with pytest.raises(JobError, match=r"worker 0 .* has ended while it was paused"):
        rig.pool.take(spec_of(NEW), after)
    rig.process.attach(NEW, after)  # it ends at this very moment
    assert after.until("exited") == [("exited", -9)]


def test_what_a_start_has_not_reached_waits_on_with_its_snapshot() -> None:
    rig = Rig()
    plan = plan_of("0 x 0 role=server\n1 b 0\n2 c 0")
    assert rig.pool.of(plan) == {plan.workers[0].process: Paused(snapshot=5)}
    rig.pool.keep({})  # of a start that has failed before
    assert rig.pool.of(plan) == {plan.workers[0].process: Paused(snapshot=5)}
    rig.process.take(Exited(id=7, status=-9))
    assert rig.pool.of(plan) == {}


def test_a_process_that_was_prepared_for_a_place_that_is_taken_is_ended() -> None:
    rig, sent = Rig(), list[Request]()
    prepared = RemoteProcess(OLD, 8, "b", RecordingListener(), sent.append)
    rig.pool.add(spec_of(OLD), prepared)
    assert [type(request) for request in sent] == [SendSignal]
    assert rig.pool.take(spec_of(NEW), RecordingListener()) is rig.process


def test_processes_without_a_use_are_ended_save_for_shards_of_hosts_that_stay() -> None:
    [serving, *_] = [host for host in parse_machinefile(THREE, source="hosts") if host.id == 1]
    for name, hosts, ended in (
        (OLD, [serving], True),
        (ProcessName(role=Role.SHARD, index=1, host="b", client=1), [serving], False),
        (ProcessName(role=Role.SHARD, index=1, host="b", client=1), [], True),
    ):
        rig = Rig(name)
        rig.pool.end_others([spec_of(name)], hosts)
        assert rig.sent == []
        rig.pool.end_others([spec_of(name, slot=1)], hosts)
        assert bool(rig.sent) == ended == (not rig.pool)
