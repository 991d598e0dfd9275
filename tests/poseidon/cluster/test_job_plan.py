"""The plan of a job: ranks, devices, shards and addresses."""

from __future__ import annotations

from fractions import Fraction

import pytest

from poseidon.cluster.job_plan import best_loads, devices_from_flag, plan_job
from poseidon.cluster.machinefile import Host, HostRole, parse_machinefile
from poseidon.errors import UsageError

TWO = (Host(id=0, address="10.0.0.7", port=9999), Host(id=1, address="fd00::8", port=0))


def test_one_worker_per_device_and_channels_shards_per_client() -> None:
    plan = plan_job(TWO, devices_per_host=("cuda:0", "cuda:1"), channels=2)
    assert [(w.rank, w.host.id, w.seat.local_rank, w.device) for w in plan.workers] == [
        (0, 0, 0, "cuda:0"),
        (1, 0, 1, "cuda:1"),
        (2, 1, 0, "cuda:0"),
        (3, 1, 1, "cuda:1"),
    ]
    assert [(s.index, s.host.id, s.channel, s.address) for s in plan.shards] == [
        (0, 0, 0, "tcp://10.0.0.7:9999"),
        (1, 0, 1, "tcp://10.0.0.7:10000"),
        (2, 1, 0, "tcp://[fd00::8]:0"),
        (3, 1, 1, "tcp://[fd00::8]:0"),
    ]
    assert (plan.worker_count, plan.shard_count, plan.workers_by_host) == (4, 4, (2, 2))
    assert plan.roles == (*plan.shards, *plan.workers)
    assert len({role.process for role in plan.roles}) == 8


def test_names() -> None:
    plan = plan_job(TWO, devices_per_host=("cpu",), channels=1)
    assert plan.workers[1].process.describe() == "worker 1 (client 1, fd00::8)"
    assert plan.shards[0].process.describe(4711) == "shard 0 (client 0, 10.0.0.7, pid 4711)"


def test_on_one_machine_ports_are_free_ones() -> None:
    clients = (Host(id=0, address="127.0.0.1", port=9999), Host(id=1, address="::1", port=10999))
    plan = plan_job(clients, devices_per_host=("cpu",), channels=2)
    assert [shard.address for shard in plan.shards] == ["tcp://127.0.0.1:0"] * 2 + [
        "tcp://[::1]:0"
    ] * 2
    assert [
        shard.port for shard in plan_job(TWO, devices_per_host=("cpu",), channels=1).shards
    ] == [9999, 0]


@pytest.mark.parametrize(
    ("options", "usual", "devices"),
    [
        (("", "gpus=2,3"), ("cuda:0", "cuda:1"), [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]),
        (("", "gpus=cpu"), ("cuda:0",), [["cuda:0"], ["cpu"]]),
        (("gpus=1,2", "gpus=0,1"), ("cpu",), [["cuda:1", "cuda:2"], ["cuda:0", "cuda:1"]]),
        (("gpus=cpu", "gpus=0"), ("cpu",), [["cpu"], ["cuda:0"]]),
        (("", "gpus=0,1"), ("cuda:0",), [["cuda:0"], ["cuda:0", "cuda:1"]]),
        (("workers=2", ""), ("cpu",), [["cpu", "cpu"], ["cpu"]]),
        (("", "workers=1"), ("cpu", "cpu"), [["cpu", "cpu"], ["cpu"]]),
        (("gpus=cpu workers=3", ""), ("cuda:0",), [["cpu"] * 3, ["cuda:0"]]),
    ],
)
def test_devices_of_the_machinefile(
    options: tuple[str, ...], usual: tuple[str, ...], devices: list[list[str]]
) -> None:
    lines = "\n".join(f"{number} 127.0.0.1 0 {words}" for number, words in enumerate(options))
    hosts = parse_machinefile(lines, source="hosts")
    plan = plan_job(hosts, devices_per_host=usual, channels=1)
    assert plan.workers_by_host == tuple(map(len, devices))
    assert [plan.workers_on(host) for host in hosts] == list(map(len, devices))
    assert [(w.rank, *w.seat[:2], w.device) for w in plan.workers] == [
        (sum(map(len, devices[:position])) + local_rank, position, local_rank, device)
        for position, own in enumerate(devices)
        for local_rank, device in enumerate(own)
    ]


def test_a_number_of_workers_is_for_the_cpu() -> None:
    (host,) = parse_machinefile("0 node0 0 workers=2", source="hosts")
    with pytest.raises(UsageError, match=r"client 0 on node0 has 2 workers on the CPU .*job runs"):
        plan_job([host], devices_per_host=("cuda:0",), channels=1)


def test_shards_listen_where_the_others_reach_them() -> None:
    clients = (
        Host(id=0, address="node0", port=5, peer_address="10.0.0.1"),
        Host(id=1, address="node1", port=5, peer_address="fe::1"),
    )
    plan = plan_job(clients, devices_per_host=("cpu",), channels=1)
    assert [shard.address for shard in plan.shards] == ["tcp://10.0.0.1:5", "tcp://[fe::1]:5"]
    assert plan.shards[0].process.host == "node0"


def machines(roles: str) -> tuple[Host, ...]:
    """One client a letter: both, worker, server."""
    role = {"b": HostRole.BOTH, "w": HostRole.WORKER, "s": HostRole.SERVER}
    return tuple(
        Host(id=number, address="127.0.0.1", port=0, role=role[letter])
        for number, letter in enumerate(roles)
    )


@pytest.mark.parametrize(
    ("roles", "works", "serves", "homes", "loads"),
    [
        ("bb", (0, 1), (0, 1), (0, 1), ()),
        ("swsw", (1, 3), (0, 2), (-1, -2), ()),
        ("sbsbbb", (1, 3, 4, 5), (0, 1, 2, 3, 4, 5), (-1, 0, -2, 1, 2, 3), (3, 1, 3, 1, 1, 1)),
        ("bbss", (0, 1), (2, 3), (-1, -2), ()),
        ("wb", (0, 1), (1,), (1,), ()),
        ("wbbbs", (0, 1, 2, 3), (1, 2, 3, 4), (1, 2, 3, -1), (3, 3, 3, 5)),
        ("w", (0,), (), (), ()),
        ("ws", (0,), (1,), (-1,), ()),
    ],
)
def test_roles(
    roles: str,
    works: tuple[int, ...],
    serves: tuple[int, ...],
    homes: tuple[int, ...],
    loads: tuple[int, ...],
) -> None:
    plan = plan_job(machines(roles), devices_per_host=("cpu",), channels=1)
    assert tuple(worker.host.id for worker in plan.workers) == works
    assert tuple(worker.seat.host for worker in plan.workers) == tuple(range(len(works)))
    assert tuple(shard.host.id for shard in plan.shards) == serves
    assert [shard.index for shard in plan.shards] == list(range(len(serves)))
    assert (plan.homes, plan.loads) == (homes, loads)
    assert plan.working_hosts == len(works)
    assert plan.has_dedicated_servers == ("s" in roles)


def test_each_shard_of_a_machine_carries_its_part() -> None:
    plan = plan_job(machines("bbbs"), devices_per_host=("cpu", "cpu"), channels=2)
    assert plan.homes == (0, 0, 1, 1, 2, 2, -1, -1)
    assert plan.loads == (1, 1, 1, 1, 1, 1, 2, 2)
    assert [worker.seat.host for worker in plan.workers] == [0, 0, 1, 1, 2, 2]


def test_a_job_without_server_may_have_workers_only() -> None:
    plan = plan_job(machines("wsw"), devices_per_host=("cpu",), channels=1, with_server=False)
    assert (plan.worker_count, plan.shard_count, plan.homes, plan.loads) == (2, 0, (), ())


def test_several_cpu_workers_are_legal() -> None:
    assert plan_job(TWO, devices_per_host=("cpu", "cpu"), channels=1).worker_count == 4
    # The workers of one client need no server: they add up among themselves.
    alone = plan_job(machines("w"), devices_per_host=("cpu", "cpu"), channels=1)
    assert (alone.worker_count, alone.shard_count) == (2, 0)


@pytest.mark.parametrize(
    ("clients", "devices", "channels", "words"),
    [
        ((), ("cpu",), 1, "client"),
        (machines("ss"), ("cpu",), 1, "client with workers"),
        (machines("ww"), ("cpu",), 1, "every client has role=worker"),
        (TWO, ("cpu",), 0, "from 1 to 1024, not 0"),
        (TWO, ("cpu",), 1025, "1025"),
    ],
)
def test_refused(
    clients: tuple[Host, ...], devices: tuple[str, ...], channels: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        plan_job(clients, devices_per_host=devices, channels=channels)


@pytest.mark.parametrize(
    ("gpu", "available", "devices"),
    [
        ("", None, ("cpu",)),
        ("cpu", 0, ("cpu",)),
        ("0", None, ("cuda:0",)),
        ("1, 0", 2, ("cuda:1", "cuda:0")),
        ("all", 2, ("cuda:0", "cuda:1")),
    ],
)
def test_devices(gpu: str, available: int | None, devices: tuple[str, ...]) -> None:
    assert devices_from_flag(gpu, count_gpus=lambda: available) == devices


def test_a_worker_on_the_cpu_needs_no_count_of_gpus() -> None:
    def count_gpus() -> int:
        raise AssertionError("counted")

    assert devices_from_flag("cpu", count_gpus=count_gpus) == ("cpu",)


@pytest.mark.parametrize(
    ("gpu", "available", "words"),
    [
        ("all", 0, "no GPU was found"),
        ("0,,1", None, "parted by commas"),
        ("-1", None, "parted by commas"),
        ("cuda:0", None, "parted by commas"),
        ("0,0", None, "twice"),
        ("1", 1, "there is no GPU 1; only 0 is"),
        ("2", 2, "there is no GPU 2; 0 to 1 are"),
        ("0", 0, "there is no GPU 0; none is"),
    ],
)
def test_device_mistakes(gpu: str, available: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        devices_from_flag(gpu, count_gpus=lambda: available)


MIXED = [(n, k) for n in range(2, 12) for k in range(1, n)]


def links(
    n: int, k: int, b: int, worker: Fraction, server: Fraction
) -> tuple[Fraction, Fraction, Fraction]:
    """Models that cross the link of a machine that does both, that works, and that serves;
    counted flow by flow.
    """
    total = b * worker + k * server
    w, s = worker / total, server / total
    # the worker to all other shards, and the shards to all other workers
    both = 2 * (1 - w) + 2 * w * (n - 1)
    return both, Fraction(2), 2 * n * s


@pytest.mark.parametrize(("n", "k"), MIXED)
def test_every_link_carries_the_same(n: int, k: int) -> None:
    worker, server = best_loads(n, k)
    both, _, serving = links(n, k, n, Fraction(worker), Fraction(server))
    assert both == serving == Fraction(4 * n * (n - 1), n * n + k * n - 2 * k)


@pytest.mark.parametrize(("n", "k"), [(n, k) for n, k in MIXED if n > 2])
def test_no_other_loads_are_better(n: int, k: int) -> None:
    loads = best_loads(n, k)
    best = max(links(n, k, n, *map(Fraction, loads)))
    others = [(worker, server) for worker in range(40) for server in range(40) if worker + server]
    assert all(
        max(links(n, k, n, Fraction(worker), Fraction(server))) > best
        for worker, server in others
        if Fraction(worker) * loads[1] != Fraction(server) * loads[0]
    )


@pytest.mark.parametrize(("n", "k", "b"), [(5, 2, 3), (8, 1, 4), (8, 7, 1), (3, 1, 1)])
def test_some_working_machines_may_have_no_shards(n: int, k: int, b: int) -> None:
    worker, server = best_loads(n, k, sharing=b)
    both, alone, serving = links(n, k, b, Fraction(worker), Fraction(server))
    assert both == serving > alone
    for other in (Fraction(99, 100), Fraction(101, 100)):
        assert max(links(n, k, b, worker * other, Fraction(server))) > both


@pytest.mark.parametrize(
    ("n", "k", "b", "expected"),
    [
        (4, 0, None, (1, 0)),
        (4, 2, None, (1, 3)),
        (4, 4, None, (0, 1)),
        (4, 9, None, (0, 1)),
        (1, 1, None, (0, 1)),
        (4, 1, 0, (0, 1)),
        (4, 0, 2, (1, 0)),
        (4, 0, 0, (0, 0)),
    ],
)
def test_the_ends(n: int, k: int, b: int | None, expected: tuple[int, int]) -> None:
    assert best_loads(n, k, sharing=b) == expected
