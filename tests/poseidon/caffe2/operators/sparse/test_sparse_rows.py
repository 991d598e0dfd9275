"""Rounds of distinct rows in the order of the indices."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe2.operators.sparse.sparse_rows import gradient_rows, rounds


def test_the_rows_of_a_round_are_distinct() -> None:
    found = [
        (rows.tolist(), positions.tolist())
        for rows, positions in rounds(torch.tensor([5, 2, 5, 5, 2]))
    ]
    assert found == [([2, 5], [1, 0]), ([2, 5], [4, 2]), ([5], [3])]
    assert list(rounds(torch.tensor([], dtype=torch.int32))) == []


def test_distinct_rows_are_one_round_in_their_order() -> None:
    ((rows, positions),) = rounds(torch.tensor([[3], [0]]))
    assert rows.tolist() == [3, 0]
    assert positions.tolist() == [0, 1]


def test_indices_of_two_dimensions_are_flattened() -> None:
    assert gradient_rows(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(9, 4)).shape == (6, 4)


@pytest.mark.parametrize(
    ("gradient", "indices", "reason"),
    [
        ((3, 4), (2,), r"\(3, 4\), expected \(2, 4\): a row for each index"),
        ((2, 5), (2,), r"\(2, 5\), expected \(2, 4\)"),
    ],
)
def test_a_gradient_without_a_row_for_each_index_is_refused(
    gradient: tuple[int, ...], indices: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        gradient_rows(torch.zeros(gradient), torch.zeros(indices), torch.zeros(9, 4))
