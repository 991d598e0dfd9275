from __future__ import annotations

import pytest

from ps_server.errors import SpecError
from ps_server.protocol.seats import Seat
from ps_server.protocol.settings import StoreSpec, TableSpec
from ps_server.protocol.virtual_workers import VirtualWorkers


def store(plane: int = 0, **settings: object) -> StoreSpec:
    tables = (TableSpec(name="w", size=4, plane=plane),)
    return StoreSpec(**{"workers": 6, "shards": 1, "tables": tables, **settings})  # type: ignore[arg-type]


def test_ranks_go_host_by_host_and_planes_across_hosts() -> None:
    spec = store(hosts=(3, 2, 1))
    assert [spec.seats.of(rank) for rank in range(6)] == [
        Seat(0, 0, 3, 3, 0),
        Seat(0, 1, 3, 3, 1),
        Seat(0, 2, 3, 3, 2),
        Seat(1, 0, 2, 3, 3),
        Seat(1, 1, 2, 3, 4),
        Seat(2, 0, 1, 3, 5),
    ]
    assert [list(spec.seats.members(local)) for local in range(3)] == [[0, 3, 5], [1, 4], [2]]
    assert (spec.seats.host_count, spec.seats.planes) == (3, 1)
    assert spec.placed == VirtualWorkers.one_each(3)


@pytest.mark.parametrize("hosts", [(), (1,) * 6])
def test_without_hosts_each_worker_has_its_own(hosts: tuple[int, ...]) -> None:
    spec = store(hosts=hosts)
    assert [spec.seats.of(rank) for rank in range(6)] == [
        Seat(rank, 0, 1, 6, rank) for rank in range(6)
    ]
    assert list(spec.seats.members(0)) == list(range(6))
    assert (spec.seats.host_count, spec.seats.planes) == (6, 1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hosts": (3, 2)}, r"hosts are \(3, 2\); expected 6 workers in all"),
        ({"hosts": (6, 0)}, "one or more on each host"),
        ({"hosts": (4, 2), "plane": 2}, "plane 2; expected a number below 2"),
        ({"plane": 1}, "plane 1; expected a number below 1"),
        ({"hosts": (4, 2), "plane": -1}, "belongs to plane -1"),
        ({"hosts": (4, 2), "outside_norm": (0, 2)}, "expected planes below 2, in order"),
        ({"hosts": (4, 2), "outside_norm": (1, 0)}, "expected planes below 2, in order"),
        ({"hosts": (4, 2), "quorum": 2}, "one worker a host"),
        (
            {"hosts": (4, 2), "virtual_workers": VirtualWorkers((0, 1, 2, 3, 4, 5, 6))},
            "placed on 6 hosts; expected at most 4096, on 2 hosts",
        ),
    ],
)
def test_hosts_that_do_not_fit_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        store(**settings)  # type: ignore[arg-type]
