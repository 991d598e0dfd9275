"""Losses that measure a distance between two blobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from poseidon.layers.base import Layer, LayerError, Shape, times
from poseidon.layers.registry import register


@register("EuclideanLoss")
class EuclideanLoss(Layer):
    """loss = 1/(2N) sum of (a - b)^2.

    Bottoms: a and b, both N x ..., with as many values for each item; both have gradients. Top: a scalar. No fields.
    """

    MIN_BOTTOMS: ClassVar[int] = 2
    MAX_BOTTOMS: ClassVar[int | None] = 2
    IS_LOSS: ClassVar[bool] = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, b = bottoms
        if not a or not b or a[0] != b[0] or math.prod(a) != math.prod(b):
            raise LayerError(
                f"bottoms have shapes {times(a)} and {times(b)}, expected the same number of values per item"
            )
        return [()]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b.reshape(a.shape)).square().sum() / (2 * a.shape[0])
