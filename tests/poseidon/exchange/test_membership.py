"""The place of a worker: on its host, in its plane, and among virtual workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poseidon.exchange.cost import Topology
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server.keys import JobKeys
from ps_server.network import Network
from ps_server.protocol.seats import Seat
from ps_server.protocol.virtual_workers import VirtualWorkers

AUTO = ExchangeOptions(kind=ExchangeKind.AUTO)


def members(
    hosts: tuple[int, ...],
    *,
    virtual: VirtualWorkers | None = None,
    shards: int = 2,
    options: ExchangeOptions = AUTO,
) -> list[Membership]:
    """All workers of a job."""
    workers = sum(hosts)
    keys = JobKeys.new(workers=workers, shards=shards)
    return [
        Membership(
            network=Network(rank=rank, size=workers, keys=keys.of_worker(rank)),
            hosts=hosts,
            shards=shards,
            local_address="/tmp/workers",
            virtual_workers=virtual,
            options=options,
        )
        for rank in range(workers)
    ]


def test_a_process_by_itself_is_one_host() -> None:
    one = Membership()
    assert one.seat == Seat()
    assert (one.seats.planes, one.shares_hosts, one.averages, one.alone) == (1, False, True, True)
    assert one.of_plane == one


@pytest.mark.parametrize(
    ("hosts", "places", "planes"),
    [
        ((1, 1), [(0, 0, 1), (1, 0, 1)], 1),
        ((2, 2), [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)], 2),
        ((2, 1, 3), [(0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 3), (2, 1, 3), (2, 2, 3)], 1),
    ],
)
def test_ranks_go_host_by_host(
    hosts: tuple[int, ...], places: list[tuple[int, int, int]], planes: int
) -> None:
    job = members(hosts)
    assert [(one.seat.host, one.seat.local_rank, one.seat.local_workers) for one in job] == places
    assert {one.seats.planes for one in job} == {planes}
    assert {one.seat.host_count for one in job} == {len(hosts)}
    assert {one.shares_hosts for one in job} == {max(hosts) > 1}


def test_without_hosts_each_worker_has_one() -> None:
    member = Membership(network=Network(rank=2, size=4))
    assert member.seat == Seat(host=2, host_count=4, rank=2)


@pytest.mark.parametrize(
    ("hosts", "virtual", "placed"),
    [
        ((2, 2), None, None),
        ((2, 1), None, (0, 2, 3)),
        ((1, 1), VirtualWorkers((0, 2, 4)), (0, 2, 4)),
        ((2, 2), VirtualWorkers((0, 1, 2, 3, 4)), (0, 2, 4)),
        ((2, 1, 3), VirtualWorkers((0, 3, 4, 6, 7, 8, 12)), (0, 4, 6, 12)),
    ],
)
def test_virtual_workers_by_host(
    hosts: tuple[int, ...], virtual: VirtualWorkers | None, placed: tuple[int, ...] | None
) -> None:
    """Hosts average, each of them counting the same, only where nothing says that they differ."""
    bounds = tuple(range(len(hosts) + 1)) if placed is None else placed
    for rank, member in enumerate(members(hosts, virtual=virtual)):
        assert member.averages == (placed is None)
        assert member.placed.bounds == bounds
        assert member.own == (range(rank, rank + 1) if virtual is None else virtual.of(rank))
        if member.seat.local_rank < member.seats.planes:
            plane = member.of_plane
            assert plane.placed.bounds == bounds
            assert plane.own == VirtualWorkers(bounds).of(member.seat.host)
            assert (plane.virtual_workers is None) == (placed is None)


@pytest.mark.parametrize(
    ("hosts", "planes"),
    [((1, 1, 1), [[0, 1, 2]]), ((2, 2), [[0, 2], [1, 3]]), ((3, 2, 4), [[0, 3, 5], [1, 4, 6]])],
)
def test_a_plane_has_one_worker_of_each_host(
    hosts: tuple[int, ...], planes: list[list[int]]
) -> None:
    job = members(hosts)
    public = [one.network.keys.own.public for one in job if one.network.keys is not None]
    for ranks in planes:
        for host, rank in enumerate(ranks):
            plane = job[rank].of_plane
            assert (plane.network.rank, plane.network.size) == (host, len(hosts))
            assert plane.network.name(host) == f"worker {rank}"
            assert (plane.hosts, plane.local_address, plane.seat.local_workers) == ((), "", 1)
            keys, whole = plane.network.keys, job[rank].network.keys
            assert keys is not None
            assert whole is not None
            assert (keys.own, keys.expect) == (whole.own, whole.expect)
            assert keys.admit == tuple(public[each] for each in ranks)
            assert (Topology.of_job(plane), plane.chooses) == (
                Topology.of_job(job[rank]),
                job[rank].chooses,
            )


def test_workers_beyond_the_planes_are_a_plane_of_the_hosts_that_have_them() -> None:
    job = members((2, 1, 3))
    assert [job[rank].plane_ranks for rank in (0, 1, 4, 5)] == [(0, 2, 3), (1, 4), (1, 4), (5,)]
    plane = job[4].of_plane
    assert (plane.network.rank, plane.network.size) == (1, 2)


@pytest.mark.parametrize(
    ("hosts", "shards", "kind", "alone"),
    [
        ((2,), 0, ExchangeKind.HYBRID, True),
        ((2,), 1, ExchangeKind.HYBRID, False),
        ((2, 1), 0, ExchangeKind.ALLREDUCE, False),
        ((2,), 1, ExchangeKind.LOCAL, True),
    ],
)
def test_one_host_without_shards_is_alone(
    hosts: tuple[int, ...], shards: int, kind: ExchangeKind, alone: bool
) -> None:
    for member in members(hosts, shards=shards, options=ExchangeOptions(kind=kind)):
        assert member.alone == alone


@pytest.mark.parametrize(
    ("hosts", "virtual", "chooses"),
    [
        ((2, 2), None, True),
        ((2,), None, False),
        ((2, 1), None, False),
        ((2, 2), VirtualWorkers((0, 1, 2, 3, 4)), False),
    ],
)
def test_hosts_choose_by_time(
    hosts: tuple[int, ...], virtual: VirtualWorkers | None, chooses: bool
) -> None:
    assert {one.chooses for one in members(hosts, virtual=virtual)} == {chooses}


def test_the_plan_counts_hosts_or_virtual_workers() -> None:
    assert Topology.of_job(members((2, 2))[0]).workers == 2
    assert Topology.of_job(members((2, 1))[0]).workers == 3
    assert Topology.of_job(members((2, 2), virtual=VirtualWorkers((0, 2, 3, 4, 6)))[0]).workers == 6


@pytest.mark.parametrize(
    ("hosts", "bounds", "own"),
    [
        ((2,), (0, 3, 6), [[0, 2, 4], [1, 3, 5]]),
        ((2, 2), (0, 2, 4, 5, 6), [[0, 2], [1, 3], [4], [5]]),
        ((2, 2), (0, 3, 4, 5, 6), [[0, 2], [1, 3], [4], [5]]),  # the first host is faster
        ((2, 2, 2), (0, 1, 2, 3, 4, 5, 6), [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_workers_that_divide_a_module_compute_for_virtual_hosts(
    hosts: tuple[int, ...], bounds: tuple[int, ...], own: list[list[int]]
) -> None:
    job = [replace(one, divides=True) for one in members(hosts, virtual=VirtualWorkers(bounds))]
    assert [list(one.own) for one in job] == own
    assert all(one.placed.count == 3 for one in job)
    assert all(one.of_plane.placed == one.placed for one in job)
