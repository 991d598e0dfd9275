"""What may come from whom, in which round of a bucket."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from poseidon.exchange.allreduce.sum_rounds import Buckets, SumRounds, bytes_of_buckets
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


def test_buckets_cut_tensors_and_slices_cut_buckets() -> None:
    buckets = Buckets({7: 3, 2: 8, 5: 1}, workers=3, bucket_bytes=5 * 4)
    assert buckets.elements == 12
    assert buckets.places == {7: slice(0, 3), 2: slice(3, 11), 5: slice(11, 12)}
    assert buckets.of == {7: range(1), 2: range(3), 5: range(2, 3)}
    assert buckets.tensors == [[7, 2], [2], [2, 5]]
    assert buckets.slices == [
        [slice(0, 2), slice(2, 4), slice(4, 5)],
        [slice(5, 7), slice(7, 9), slice(9, 10)],
        [slice(10, 11), slice(11, 12), slice(12, 12)],
    ]
    assert [buckets.shared(2, bucket) for bucket in range(3)] == [2, 5, 1]


def test_rank_0_has_a_slice_of_each_bucket_and_the_last_may_have_none() -> None:
    buckets = Buckets({0: 9}, workers=4, bucket_bytes=4 * 4)
    assert [buckets.owners(bucket) for bucket in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]


@pytest.mark.parametrize("sizes", [{}, {3: 0}])
def test_nothing_to_sum_has_no_bucket(sizes: dict[int, int]) -> None:
    buckets = Buckets(sizes, workers=2)
    assert len(buckets) == 0
    assert all(not of for of in buckets.of.values())


@pytest.mark.parametrize(
    ("elements", "workers", "expected"),
    [
        (1, 2, 2**20),
        (1_900_000, 2, 2**20),  # a GPT of 7.6 MB
        (19_200_000, 2, 2**23),  # of 77 MB
        (25_600_000, 4, 2**24),  # ResNet-50
        (25_600_000, 8, 2**24),
        (10**9, 4, 2**24),
        (10**9, 3, 3 * 2**22),
    ],
)
def test_small_models_have_several_buckets_too(elements: int, workers: int, expected: int) -> None:
    assert bytes_of_buckets(elements, workers) == expected
    buckets = Buckets({0: elements}, workers)
    whole = buckets.slices[0]
    assert 4 * (whole[-1].stop - whole[0].start) == min(expected, 4 * elements)
