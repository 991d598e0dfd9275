"""Nets that take time instead of computing: two cores can stand for N accelerators.

    net = EmulatedNet(layers_of("alexnet"), batch=32, compute_s=0.05)
    net().sum().backward()

Each layer sleeps for its share of the compute time, a third of it forward, two thirds backward, and
returns memory that it holds. The parameters have the real shapes, gradients the real sizes; a
fully-connected layer is an `nn.Linear` whose input and output gradient have the real number of
rows. The values mean nothing.

Law: a backward pass computes nothing and allocates nothing of a parameter's size. Gradients are
views of one constant buffer, which the exchange must only read. The net does not know which
exchange it has: the same classes serve every system that is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from poseidon.observe.plan.shapes import LayerShape, Shape, shares_of_work

FORWARD_PART = 1 / 3
VALUE = 0.01
GRADIENT = 1e-6
"""The value of every element of every gradient."""


class Pace:
    """The clock of an emulated accelerator: pieces of work run one after the other, each for its
    time.

    A piece begins when the one before it ends, even if the sleep returned late: the few processors
    of this machine emulate many hosts. Before a piece of a forward pass the caller may have waited
    for new weights or for other workers' gradients. If it was away for longer than `slack_s` it has
    waited, and the accelerator was idle until then. Within a backward pass there is nothing to wait
    for: a delay of the caller comes from this machine, and a real accelerator has its work queued.

    Args:
        slack_s: see above.
        now: returns the time in seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        slack_s: float = 1e-3,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slack_s = slack_s
        self._now = now
        self._sleep = sleep
        self._done_s = self._returned_s = -math.inf

    def spend(self, work_s: float, *, after_wait: bool) -> None:
        """Return when a piece of work has finished.

        Args:
            work_s: its duration.
            after_wait: True if the caller may have waited for other workers since the last piece.
        """
        now = self._now()
        if after_wait and now - self._returned_s > self._slack_s:
            self._done_s = now
        self._done_s += work_s
        left_s = self._done_s - now
        if left_s > 0:
            self._sleep(left_s)
        self._returned_s = self._now()


class Gradients:
    """One buffer for the gradients of all tensors; it grows to the largest."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    @property
    def elements(self) -> int:
        """Number of elements of the largest gradient so far."""
        return self._memory.numel()

    def of(self, shape: Shape) -> Tensor:
        """Return a constant gradient of this shape; a fresh view, so that autograd takes it
        without a copy.
        """
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = torch.full((size,), GRADIENT)
        return self._memory[:size].view(shape)


class _Work(Function):
    """A layer as autograd sees it: x and the layer's parameters in, y out."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: EmulatedLayer | EmulatedLinear, *parameters: Tensor
    ) -> Tensor:
        layer.pace.spend(layer.forward_s, after_wait=True)
        ctx.layer = layer
        ctx.x_shape = x.shape
        ctx.shapes = [parameter.shape for parameter in parameters]
        return layer.output.detach()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        layer.pace.spend(layer.backward_s, after_wait=False)
        wanted = ctx.needs_input_grad
        below = layer.gradients.of(ctx.x_shape) if wanted[0] else None
        own = [
            layer.gradients.of(shape) if needs else None
            for shape, needs in zip(ctx.shapes, wanted[2:], strict=True)
        ]
        return (below, None, *own)


def _work(x: Tensor, layer: EmulatedLayer | EmulatedLinear) -> Tensor:
    y: Tensor = _Work.apply(x, layer, *layer.parameters(recurse=False))  # type: ignore[no-untyped-call]
    return y


class EmulatedLayer(nn.Module):
    """A layer whose gradients are dense, such as a convolution; blob0 is its weight.

    Args:
        shape: its tensors.
        output: its output.
        pace: the accelerator's clock.
        gradients: the buffer of its gradients.
        work_s: its part of the compute time.
    """

    def __init__(
        self, shape: LayerShape, output: Tensor, pace: Pace, gradients: Gradients, work_s: float
    ) -> None:
        super().__init__()
        self.output, self.pace, self.gradients = output, pace, gradients
        self.forward_s, self.backward_s = work_s * FORWARD_PART, work_s * (1 - FORWARD_PART)
        for index, size in enumerate(shape.tensors):
            self.register_parameter(f"blob{index}", nn.Parameter(torch.full(size, VALUE)))

    def forward(self, x: Tensor) -> Tensor:
        """Spend the layer's time."""
        return _work(x, self)


class EmulatedLinear(nn.Linear):
    """A fully-connected layer: its weight's gradient is skipped if it is not needed as a dense
    tensor.

    Args:
        shape: its weight (outputs x inputs) and bias.
        output: its output, rows x outputs.
        pace: the accelerator's clock.
        gradients: the buffer of its gradients.
        work_s: its part of the compute time.
    """

    offers_factors = True
    """Declares to Poseidon that the weight's gradient is u^T v of the output's gradient and the
    input.
    """

    def __init__(
        self, shape: LayerShape, output: Tensor, pace: Pace, gradients: Gradients, work_s: float
    ) -> None:
        outputs, inputs = shape.tensors[0]
        super().__init__(inputs, outputs, bias=len(shape.tensors) > 1)
        self.output, self.pace, self.gradients = output, pace, gradients
        self.forward_s, self.backward_s = work_s * FORWARD_PART, work_s * (1 - FORWARD_PART)

    def reset_parameters(self) -> None:
        """Set constants: random numbers for a hundred million elements take seconds."""
        for parameter in self.parameters():
            nn.init.constant_(parameter, VALUE)

    def forward(self, x: Tensor) -> Tensor:
        """Spend the layer's time."""
        return _work(x, self)


class EmulatedNet(nn.Module):
    """A chain of emulated layers.

    Args:
        layers: their shapes, in forward order.
        batch: rows of a fully-connected layer's input. Layers with outputs of one shape share their
            memory.
        compute_s: time of one forward and backward pass of the whole.
        pace: the accelerator's clock; one of its own when not given.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        batch: int,
        compute_s: float,
        pace: Pace | None = None,
    ) -> None:
        super().__init__()
        pace, gradients = pace or Pace(), Gradients()
        self.layers = nn.ModuleList()
        token = torch.full((1,), VALUE)
        outputs: dict[int, Tensor] = {}
        for index, (shape, share) in enumerate(zip(layers, shares_of_work(layers), strict=True)):
            following = layers[index + 1] if index + 1 < len(layers) else None
            columns = _columns(shape, following)
            if columns and columns not in outputs:
                outputs[columns] = torch.full((batch, columns), VALUE)
            output = outputs[columns] if columns else token
            kind = EmulatedLinear if shape.fully_connected else EmulatedLayer
            self.layers.append(kind(shape, output, pace, gradients, compute_s * share))
        first = layers[0]
        self.input = (
            torch.full((batch, first.tensors[0][1]), VALUE) if first.fully_connected else token
        )

    def forward(self) -> Tensor:
        """Run one forward pass over any batch. Return the last layer's output."""
        x = self.input
        for layer in self.layers:
            x = layer(x)
        return x


def _columns(shape: LayerShape, following: LayerShape | None) -> int:
    """Return the columns of a layer's output, the input of the following layer; 0: the output is
    one number.
    """
    if following is not None:
        return following.tensors[0][1] if following.fully_connected else 0
    return shape.tensors[0][0] if shape.fully_connected else 0
