"""Which hosts tasks make up, and who cannot take part."""

from __future__ import annotations

import pytest

from poseidon.cluster.agent.messages import Join
from poseidon.cluster.rendezvous.hosts import leaders_of, rejection_reason
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


def test_hosts_are_numbered_by_the_ranks_of_their_leaders() -> None:
    tasks = arrivals(("a", 0), ("b", 0), ("a", 1), ("b", 1))
    assert leaders_of(tasks[::-1]) == tuple(tasks[:2])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([("a", 1), ("a", 0)], "rank 0 is not the first task of its host"),
        ([("a", 0), ("a", 1), ("b", 0)], "3 tasks on 2 hosts are not the same number"),
        ([("a", 0), ("a", 1), ("b", 0), ("a", 2)], "4 tasks on 2 hosts are not the same number"),
    ],
)
def test_tasks_that_make_no_job(places: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        leaders_of(arrivals(*places))


def test_who_cannot_take_part() -> None:
    first, second = arrivals(("a", 0), ("b", 0))
    assert rejection_reason(second, [first], size=2, version="1") is None
    for size, version, others, message in (
        (2, "2", [first], "rank 1 on b has Poseidon 1, rank 0 has 2"),
        (3, "1", [first], "rank 1 on b expects 2 tasks, rank 0 3"),
        (2, "1", [first, second], "rank 1 on b has joined already, on b"),
    ):
        assert message in str(rejection_reason(second, others, size=size, version=version))
