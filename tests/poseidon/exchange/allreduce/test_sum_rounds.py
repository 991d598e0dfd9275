"""What may come from whom, in which round of a bucket."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from poseidon.exchange.allreduce.buckets import Buckets
from poseidon.exchange.allreduce.sum_rounds import SumRounds
from ps_server import RemoteProtocolError
from ps_server.protocol.virtual_workers import Node, VirtualWorkers

WORKERS = VirtualWorkers((0, 3, 4))
"""Rank 0 computes for virtual workers 0 to 2 and sends two sums; rank 1 for virtual worker 3."""


def rounds() -> SumRounds:
    """Return the rounds of rank 0, with one bucket of two slices."""
    return SumRounds(0, WORKERS, Buckets({0: 4}, workers=2))


def test_a_round_takes_each_part_and_each_sum_once() -> None:
    own = rounds()
    assert own.begin(0) == 0
    assert own.take_part(0, 0, 0, 0) == Node(0, 2)
    assert own.missing(0) == [1]
    assert own.take_part(1, 0, 0, 0) == Node(3, 4)
    assert own.take_part(0, 0, 0, 1) == Node(2, 3)
    assert own.take_mean(1, 0, 0) == slice(2, 4)
    assert not own.put(0)
    assert own.missing(0) == []
    assert own.take_mean(0, 0, 0) == slice(0, 2)
    assert not own.has_ended(0)
    assert own.put(0)
    assert own.has_ended(0)
    assert own.begin(0) == own.round(0) == 1


def test_the_next_part_may_come_before_the_last_sums() -> None:
    own = rounds()
    own.begin(0)
    for sender, number in ((0, 0), (0, 1), (1, 0)):
        own.take_part(sender, 0, 0, number)
    own.take_part(1, 0, 1, 0)  # rank 1 has this worker's mean, and its own
    assert own.missing(0) == [1]


def test_values_of_rank_0_take_the_place_of_all_parts() -> None:
    other = SumRounds(1, WORKERS, Buckets({0: 4}, workers=2))
    other.begin(0)
    other.take_values(0, 0, 0)
    assert other.take_mean(1, 0, 0) == slice(2, 4)


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda own: own.take_part(1, 1, 0, 0), id="no such bucket"),
        pytest.param(lambda own: own.take_part(1, -1, 0, 0), id="a negative bucket"),
        pytest.param(lambda own: own.take_part(1, 0, 1, 0), id="the part of a later round"),
        pytest.param(lambda own: own.take_part(1, 0, 0, 1), id="no such node"),
        pytest.param(lambda own: own.take_part(0, 0, 0, 0), id="a part twice"),
        pytest.param(lambda own: own.take_mean(1, 0, 1), id="the mean of a later round"),
        pytest.param(lambda own: own.take_mean(2, 0, 0), id="no such owner"),
        pytest.param(lambda own: own.take_values(1, 0, 0), id="values of another rank"),
        pytest.param(lambda own: own.take_values(0, 0, 0), id="values beside parts"),
    ],
)
def test_nothing_else_is_legal(take: Callable[[SumRounds], object]) -> None:
    own = rounds()
    own.begin(0)
    own.take_part(0, 0, 0, 0)
    with pytest.raises(RemoteProtocolError):
        take(own)
    own.take_part(1, 0, 0, 0)  # nothing has changed
    own.take_mean(1, 0, 0)


def test_a_sum_before_the_own_parts_is_not_legal() -> None:
    own = rounds()
    with pytest.raises(RemoteProtocolError):
        own.take_mean(1, 0, 0)
