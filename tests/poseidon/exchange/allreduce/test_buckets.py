"""The layout of buckets and slices."""

from __future__ import annotations

import pytest

from poseidon.exchange.allreduce.buckets import Buckets, bytes_of_buckets


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
