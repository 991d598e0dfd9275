"""The plan of a job: ranks, devices, shards and addresses."""

from __future__ import annotations

import pytest

from poseidon.cluster.machine_words import ClientRole
from poseidon.cluster.machinefile import Client
from poseidon.cluster.plan import devices_from_flag, plan_job
from poseidon.errors import UsageError

TWO = (Client(id=0, host="10.0.0.7", port=9999), Client(id=1, host="fd00::8", port=0))


def test_one_worker_per_device_and_channels_shards_per_client() -> None:
    plan = plan_job(TWO, devices_per_client=("cuda:0", "cuda:1"), channels=2)
    assert [(w.rank, w.client.id, w.local_rank, w.device) for w in plan.workers] == [
        (0, 0, 0, "cuda:0"),
        (1, 0, 1, "cuda:1"),
        (2, 1, 0, "cuda:0"),
        (3, 1, 1, "cuda:1"),
    ]
    assert [(s.index, s.client.id, s.channel, s.address) for s in plan.shards] == [
        (0, 0, 0, "tcp://10.0.0.7:9999"),
        (1, 0, 1, "tcp://10.0.0.7:10000"),
        (2, 1, 0, "tcp://[fd00::8]:0"),
        (3, 1, 1, "tcp://[fd00::8]:0"),
    ]
    assert (plan.worker_count, plan.shard_count, plan.workers_per_client, plan.channels) == (4, 4, 2, 2)
    assert plan.roles == (*plan.shards, *plan.workers)
    assert len({role.process for role in plan.roles}) == 8


def test_names() -> None:
    plan = plan_job(TWO, devices_per_client=("cpu",), channels=1)
    assert plan.workers[1].process.describe() == "worker 1 (client 1, fd00::8)"
    assert plan.shards[0].process.describe(4711) == "shard 0 (client 0, 10.0.0.7, pid 4711)"


def test_on_one_machine_ports_are_free_ones() -> None:
    clients = (Client(id=0, host="127.0.0.1", port=9999), Client(id=1, host="::1", port=10999))
    plan = plan_job(clients, devices_per_client=("cpu",), channels=2)
    assert [shard.address for shard in plan.shards] == ["tcp://127.0.0.1:0"] * 2 + ["tcp://[::1]:0"] * 2
    assert [shard.port for shard in plan_job(TWO, devices_per_client=("cpu",), channels=1).shards] == [
        9999,
        0,
    ]


def _with_gpus(*gpus: str | None) -> tuple[Client, ...]:
    return tuple(Client(id=number, host="127.0.0.1", port=0, gpus=words) for number, words in enumerate(gpus))


@pytest.mark.parametrize(
    ("gpus", "usual", "devices"),
    [
        ((None, "2,3"), ("cuda:0", "cuda:1"), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ((None, "cpu"), ("cuda:0",), ["cuda:0", "cpu"]),
        (("1,2", "0,1"), ("cpu",), ["cuda:1", "cuda:2", "cuda:0", "cuda:1"]),
        (("cpu", "0"), ("cpu",), ["cpu", "cuda:0"]),
    ],
)
def test_devices_of_the_machinefile(
    gpus: tuple[str | None, ...], usual: tuple[str, ...], devices: list[str]
) -> None:
    plan = plan_job(_with_gpus(*gpus), devices_per_client=usual, channels=1)
    assert [worker.device for worker in plan.workers] == devices
    assert plan.workers_per_client == len(devices) // 2


def test_a_machine_with_another_number_of_devices_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"client 1 on 127.0.0.1 has gpus=0,1, 2 workers, where the others have 1"
    ):
        plan_job(_with_gpus(None, "0,1"), devices_per_client=("cuda:0",), channels=1)


def test_shards_listen_where_the_others_reach_them() -> None:
    clients = (
        Client(id=0, host="node0", port=5, address="10.0.0.1"),
        Client(id=1, host="node1", port=5, address="fe::1"),
    )
    plan = plan_job(clients, devices_per_client=("cpu",), channels=1)
    assert [shard.address for shard in plan.shards] == ["tcp://10.0.0.1:5", "tcp://[fe::1]:5"]
    assert plan.shards[0].process.host == "node0"


def machines(roles: str) -> tuple[Client, ...]:
    """One client a letter: both, worker, server."""
    role = {"b": ClientRole.BOTH, "w": ClientRole.WORKER, "s": ClientRole.SERVER}
    return tuple(
        Client(id=number, host="127.0.0.1", port=0, role=role[letter]) for number, letter in enumerate(roles)
    )


@pytest.mark.parametrize(
    ("roles", "works", "serves", "homes", "shares"),
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
    shares: tuple[int, ...],
) -> None:
    plan = plan_job(machines(roles), devices_per_client=("cpu",), channels=1)
    assert tuple(worker.client.id for worker in plan.workers) == works
    assert tuple(worker.position for worker in plan.workers) == tuple(range(len(works)))
    assert tuple(shard.client.id for shard in plan.shards) == serves
    assert [shard.index for shard in plan.shards] == list(range(len(serves)))
    assert (plan.homes, plan.shares) == (homes, shares)
    assert plan.working_clients == len(works)
    assert plan.has_dedicated_servers == ("s" in roles)


def test_each_shard_of_a_machine_carries_its_part() -> None:
    plan = plan_job(machines("bbbs"), devices_per_client=("cpu", "cpu"), channels=2)
    assert plan.homes == (0, 0, 1, 1, 2, 2, -1, -1)
    assert plan.shares == (1, 1, 1, 1, 1, 1, 2, 2)
    assert [worker.position for worker in plan.workers] == [0, 0, 1, 1, 2, 2]


def test_a_job_without_server_may_have_workers_only() -> None:
    plan = plan_job(machines("wsw"), devices_per_client=("cpu",), channels=1, with_server=False)
    assert (plan.worker_count, plan.shard_count, plan.homes, plan.shares) == (2, 0, (), ())


def test_several_cpu_workers_are_legal() -> None:
    assert plan_job(TWO, devices_per_client=("cpu", "cpu"), channels=1).worker_count == 4
    # Those of one client need no server: they add up among themselves.
    alone = plan_job(machines("w"), devices_per_client=("cpu", "cpu"), channels=1)
    assert (alone.worker_count, alone.shard_count) == (2, 0)


@pytest.mark.parametrize(
    ("clients", "devices", "channels", "words"),
    [
        ((), ("cpu",), 1, "client"),
        (machines("ss"), ("cpu",), 1, "client that works"),
        (machines("ww"), ("cpu",), 1, "every client says role=worker"),
        (TWO, (), 1, "device"),
        (TWO, ("cuda:0", "cuda:0"), 1, "twice"),
        (TWO, ("cpu",), 0, "from 1 to 1024, not 0"),
        (TWO, ("cpu",), 1025, "1025"),
    ],
)
def test_refused(clients: tuple[Client, ...], devices: tuple[str, ...], channels: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_job(clients, devices_per_client=devices, channels=channels)


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
    assert devices_from_flag(gpu, available=available) == devices


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
        devices_from_flag(gpu, available=available)
