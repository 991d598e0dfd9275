"""The order of records in a list."""

from __future__ import annotations

import itertools

import pytest

from poseidon.caffe.data.batches.lists import LEAST, MOST, RecordOrder, permutation, read_label
from poseidon.errors import DataError


def one_pass(order: RecordOrder, number: int) -> list[int]:
    return [order.record(number * len(order) + place) for place in range(len(order))]


def test_unshuffled_the_list_begins_anew() -> None:
    order = RecordOrder([3, 2], shuffle=False, seed=1)
    assert len(order) == 5
    assert [order.record(stream) for stream in range(7)] == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("sizes", [[7], [3, 4, 1]])
def test_each_pass_has_every_record_once_in_an_order_of_its_own(sizes: list[int]) -> None:
    order = RecordOrder(sizes, shuffle=True, seed=5)
    passes = [one_pass(order, number) for number in range(4)]
    assert all(sorted(found) == list(range(sum(sizes))) for found in passes)
    assert len({tuple(found) for found in passes}) > 1
    # A resumed run asks for the middle of a pass first.
    assert RecordOrder(sizes, shuffle=True, seed=5).record(2 * sum(sizes) + 3) == passes[2][3]


def test_groups_stay_together() -> None:
    order = RecordOrder([3, 4, 2], shuffle=True, seed=2)
    groups = [order.group(record)[0] for record in one_pass(order, 1)]
    assert len([1 for a, b in itertools.pairwise(groups) if a != b]) == 2
    assert [order.group(record) for record in (0, 2, 3, 8)] == [(0, 0), (0, 2), (1, 0), (2, 1)]


def test_seeds_differ() -> None:
    assert permutation(1, 0, 20).tolist() != permutation(2, 0, 20).tolist()


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("0", 0),
        ("+7", 7),
        ("-1234567890", -1234567890),
        ("0000000000000012", 12),
        ("2147483647", MOST),
        ("-2147483648", LEAST),
        *[
            (text, None)
            for text in ("", "-", "+-5", "1.0", "1e3", "0x1", "x", " 1", "\u0663", "1_0")
        ],
    ],
)
def test_a_label(text: str, label: int | None) -> None:
    assert read_label(text, "list:3") == label


@pytest.mark.parametrize("text", ["2147483648", "-2147483649", "9" * 5000])
def test_a_label_that_does_not_fit(text: str) -> None:
    with pytest.raises(DataError, match=r"^list:3: the label -?\d.* is out of range"):
        read_label(text, "list:3")
