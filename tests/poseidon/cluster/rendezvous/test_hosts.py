"""Which hosts tasks make up, and who cannot take part."""

from __future__ import annotations

import pytest

from poseidon.cluster.agent.messages import Join
from poseidon.cluster.rendezvous.hosts import hosts_of, rejection_reason
from poseidon.errors import JobError


def arrivals(*places: tuple[str, int]) -> list[Join]:
    """Tasks by rank: host and local rank of each."""
    return [
        Join(
            version="1",
            rank=rank,
            size=len(places),
            local_rank=local,
            address=f"at {host}",
            host=host,
        )
        for rank, (host, local) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("places", "hosts"),
    [
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [(0, 2), (1, 2)]),
        ([("a", 0), ("a", 1), ("b", 0)], [(0, 2), (2, 1)]),
        ([("a", 0), ("b", 0), ("a", 1), ("a", 2)], [(0, 3), (1, 1)]),
        # containers of one machine
        ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [(0, 2), (2, 2)]),
        ([("a", 0), ("a", 0), ("a", 1), ("a", 0)], [(0, 1), (1, 2), (3, 1)]),
        ([("a", 0), ("a", 0), ("a", 1), ("a", 1)], [(0, 2), (1, 2)]),
    ],
)
def test_hosts_are_numbered_by_the_ranks_of_their_first_tasks(
    places: list[tuple[str, int]], hosts: list[tuple[int, int]]
) -> None:
    found = hosts_of(arrivals(*places)[::-1])
    assert [(host.first.rank, host.tasks) for host in found] == hosts


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([("a", 1), ("a", 0)], "rank 0 has a local rank other than 0"),
        (
            [("a", 0), ("b", 1)],
            "rank 1 on b has local rank 1, and no task there has local rank 0; expected 0, 1, ...",
        ),
        ([("a", 0), ("a", 2)], "rank 1 on a has local rank 2, and no task there has local rank 1"),
    ],
)
def test_tasks_that_make_no_job(places: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        hosts_of(arrivals(*places))


def test_who_cannot_take_part() -> None:
    first, second = arrivals(("a", 0), ("b", 0))
    assert rejection_reason(second, [first], size=2, version="1") is None
    for size, version, others, message in (
        (2, "2", [first], "rank 1 on b has Poseidon 1, rank 0 has 2"),
        (3, "1", [first], "rank 1 on b expects 2 tasks, rank 0 3"),
        (2, "1", [first, second], "rank 1 on b has joined already, on b"),
    ):
        assert message in str(rejection_reason(second, others, size=size, version=version))
