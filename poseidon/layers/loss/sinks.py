"""Layers that only consume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from poseidon.layers.base import Layer, Shape
from poseidon.layers.registry import register


@register("Silence")
class Silence(Layer):
    """Uses its bottoms up, so that they are not outputs of the net. Bottoms: one or more. No tops, no fields."""

    MAX_BOTTOMS: ClassVar[int | None] = None
    MIN_TOPS: ClassVar[int] = 0
    MAX_TOPS: ClassVar[int | None] = 0

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return []

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        return ()
