"""`GatherRangesToDense`: ranges of a vector as matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.arrays.gather import taken
from poseidon.caffe2.operators.registry import NO_GRADIENT, operator


@operator("GatherRangesToDense", gradient=NO_GRADIENT, inputs=(2, 3), expected="L, N R 2, L")
class GatherRangesToDense:
    """One matrix for each of the ranges of an example: rows of its length, 0 where a range is
    empty or has a different length.

    It counts the empty ranges and the ranges of a different length over all runs, and stops where
    they are too many.

    Args:
        lengths: the width of each output.
        min_observation: the ranges of an output below which a share is taken of this number.
        max_mismatched_ratio, max_empty_ratio: the largest legal shares of such ranges; from 1 on
            nothing is checked.
    """

    def __init__(
        self,
        *,
        lengths: list[int],
        min_observation: int = 10000,
        max_mismatched_ratio: float = 1.0,
        max_empty_ratio: float = 1.0,
    ) -> None:
        self.lengths = lengths
        self.min_observation = min_observation
        self.limits = {"of a different length": max_mismatched_ratio, "empty": max_empty_ratio}
        self.seen = 0
        self.found = {kind: np.zeros(len(lengths), np.int64) for kind in self.limits}

    def __call__(self, x: Any, ranges: Tensor, key: Tensor | None = None) -> tuple[Any, ...]:
        """Return the matrices.

        Args:
            x: a vector.
            ranges: (start, length) of shape (examples, ranges, 2); a length is the argument's,
                or 0.
            key: numbers by which the entries of a range are sorted.

        Raises:
            ValueError: `ranges` has not one range for each output, or too many are empty or of
                a different length.
        """
        if ranges.shape[1] != len(self.lengths):
            raise ValueError(f"{ranges.shape[1]} ranges are given for {len(self.lengths)} outputs")
        if not ranges.is_meta:
            self._count(ranges)
        places = range(len(self.lengths))
        return tuple(_dense(x, ranges[:, place], key, self.lengths[place]) for place in places)

    def _count(self, ranges: Tensor) -> None:
        sizes = ranges[..., 1].cpu().numpy()
        self.seen += len(sizes)
        self.found["empty"] += (sizes == 0).sum(0)
        self.found["of a different length"] += (
            (sizes != 0) & (sizes != np.array(self.lengths))
        ).sum(0)
        for kind, limit in self.limits.items():
            allowed = max(self.seen, self.min_observation) * limit
            for place in np.flatnonzero(self.found[kind] > allowed) if limit < 1 else ():
                raise ValueError(
                    f"{self.found[kind][place]} of {self.seen} ranges of the output {place} are "
                    f"{kind}; at most {allowed:g} are allowed"
                )


def _dense(x: Any, ranges: Tensor, key: Tensor | None, width: int) -> Any:
    """Return the matrix of one output."""
    whole = ranges[:, 1] == width
    if len(x) == 0:
        return (
            x.new_zeros(len(ranges), width)
            if isinstance(x, Tensor)
            else np.full((len(ranges), width), b"", object)
        )
    rows = torch.where(whole, ranges[:, 0].long(), 0)[:, None] + torch.arange(
        width, device=ranges.device
    )
    rows = rows.clamp(max=len(x) - 1)
    if key is not None:
        rows = rows.gather(1, key[rows].argsort(dim=1, stable=True))
    found = taken(x, rows)
    if isinstance(found, np.ndarray):
        found[~whole.cpu().numpy()] = b""
        return found
    return torch.where(whole[:, None], found, 0)
