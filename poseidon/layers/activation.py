"""Activations: the same function of every value, top shaped as bottom, each allowed in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.layers.base import Layer, Shape
from poseidon.layers.registry import register


class Activation(Layer):
    """A function of single values: one bottom, one top of its shape."""

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return [bottoms[0]]


@register("ReLU")
class ReLU(Activation):
    """y = max(0, x) + negative_slope min(0, x). The slope at 0 is negative_slope.

    Bottom: any shape. Top: the same. Fields (relu_param): negative_slope. `engine` changes nothing here.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.slope = self.param.relu_param.negative_slope
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        if self.slope == 0:
            return torch.relu_(bottom) if self.overwrites_bottom else torch.relu(bottom)
        # Overwritten values tell the sign of x only while the slope keeps it.
        return functional.leaky_relu(bottom, self.slope, inplace=self.overwrites_bottom and self.slope > 0)


@register("Sigmoid")
class Sigmoid(Activation):
    """y = 1 / (1 + exp(-x)). Bottom: any shape. Top: the same. No fields but `engine`, which changes nothing."""

    def forward(self, bottom: Tensor) -> Tensor:
        return torch.sigmoid(bottom)


@register("TanH")
class TanH(Activation):
    """y = tanh(x). Bottom: any shape. Top: the same. No fields but `engine`, which changes nothing."""

    def forward(self, bottom: Tensor) -> Tensor:
        return torch.tanh(bottom)
