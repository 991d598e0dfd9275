"""Rows of tables by their indices: updates in the order of the indices, also where one occurs
more than once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def rounds(indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return pairs (rows, positions) such that the rows of a pair are distinct.

    The k-th pair has the k-th occurrence of each index. Updates round by round give what a loop
    over the indices gives.

    Args:
        indices: the rows, of any shape; they are flattened.
    """
    rows = indices.reshape(-1).long()
    if not rows.numel():
        return
    ordered, positions = torch.sort(rows, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    counter = torch.arange(rows.numel(), device=rows.device)
    occurrence = counter - torch.cummax(torch.where(first, counter, 0), 0).values
    last = int(occurrence.max())
    if last == 0:
        yield rows, counter
        return
    for number in range(last + 1):
        chosen = positions[occurrence == number]
        yield rows[chosen], chosen


def by_row(values: Tensor, table: Tensor) -> Tensor:
    """Return one value for each row in a shape that broadcasts over rows of a table."""
    return values.reshape(-1, *[1] * (table.dim() - 1))


def gradient_rows(gradient: Tensor, indices: Tensor, table: Tensor) -> Tensor:
    """Return the gradient with one row for each index, in the shape of the table's rows.

    Raises:
        ValueError: its first dimensions differ from the shape of the indices, or its rows differ
            in size from the table's.
    """
    row, places = table.shape[1:], indices.dim()
    if gradient.shape[:places] != indices.shape or gradient.shape[places:].numel() != row.numel():
        raise ValueError(
            f"the gradient has the shape {tuple(gradient.shape)}, expected "
            f"{(*indices.shape, *row)}: a row for each index"
        )
    return gradient.reshape(indices.numel(), *row)
