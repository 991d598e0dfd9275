"""Parts of sequences that are masked: by length, by a window, above or below the diagonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import axis_of
from poseidon.caffe2.operators.registry import operator
from poseidon.errors import counted


def _mask_rule(maker: GradientMaker) -> None:
    rest = maker.forward.input[1:]
    made = maker.op("SequenceMask", [maker.GO(0), *rest], [maker.GI(0)])
    made.arg.add(name="grad", i=1)


def _masked(mode: str, row: Tensor, column: Tensor, given: Tensor | None, radius: int) -> Tensor:
    """Return which places are masked, from the row and the column of each."""
    if mode == "sequence" and given is not None:
        return column >= given[row]
    if mode == "window" and given is not None:
        return (column - given[row]).abs() > radius
    compare: dict[str, Any] = {
        "upper": torch.gt,
        "lower": torch.lt,
        "upperdiag": torch.ge,
        "lowerdiag": torch.le,
    }
    if mode not in compare:
        wanted = "sequence and window (with a second input), upper, lower, upperdiag, lowerdiag"
        raise ValueError(
            f"SequenceMask has no mode {mode!r} for these inputs; the modes are {wanted}"
        )
    result: Tensor = compare[mode](column, row)
    return result


@operator("SequenceMask", gradient=_mask_rule)
def sequence_mask(
    x: Tensor,
    given: Tensor | None = None,
    *,
    mode: str,
    axis: int = 1,
    radius: int = 10,
    grad: bool = False,
    fill_val: float = float("-inf"),
    batch: int | None = None,
    repeat_from_axis: int | None = None,
) -> Tensor:
    """Return x with some values replaced by `fill_val` (by 0 in a gradient).

    x is taken as a matrix: the dimensions before `axis` are rows, the others columns.

    Args:
        x: numbers.
        given: lengths of the rows (mode sequence) or the middle of their windows (mode window).
        mode: `sequence` masks the columns from the row's length on; `window` those more than
            `radius` from the middle; `upper`, `lower` those on one side of the diagonal;
            `upperdiag`, `lowerdiag` the diagonal too.
        axis: the first dimension of the columns.
        radius: see mode.
        grad: whether this is the gradient.
        fill_val: the value of masked places.
        batch: the last dimension that counts batches, each a matrix of its own.
        repeat_from_axis: the first dimension behind the columns: all its values are masked or none.

    Raises:
        ValueError: there is no such mode.
    """
    dims = x.shape
    axis = axis_of(axis, x.dim())
    begin = 0 if batch is None else axis_of(batch, x.dim()) + 1
    end = x.dim() if repeat_from_axis is None else axis_of(repeat_from_axis, x.dim())
    rows, columns = dims[begin:axis].numel(), dims[axis:end].numel()
    row = torch.arange(rows, device=x.device)[:, None]
    column = torch.arange(columns, device=x.device)
    if given is not None and given.numel() < rows:
        raise ValueError(f"the second input has {counted(given.numel(), 'value')}, expected {rows}")
    mask = _masked(mode, row, column, None if given is None else given.reshape(-1), radius)
    mask = mask.reshape(dims[begin:end] + (1,) * (x.dim() - end))
    return x.masked_fill(mask, 0.0 if grad else fill_val)
