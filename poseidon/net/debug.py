"""`debug_info`: mean absolute values of every blob, forward and backward, in the lines of Caffe's Net.

    [Forward] Layer conv1, top blob conv1 data: 0.0645037
    [Forward] Layer conv1, param blob 0 data: 0.00899114
    [Backward] Layer loss, bottom blob fc1 diff: 0.00336934
    [Backward] Layer fc1, param blob 0 diff: 0.000912
    [Backward] All net params (data, diff): L1 norm = (2711.42, 7086.66); L2 norm = (6.11659, 4085.07)

Law: watching changes no number. A diff is what this layer gives its bottom, also where other layers read the same blob:
Caffe, whose copies of such a blob have diffs of their own, shows the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from poseidon.layers.base import Layer
from poseidon.metrics.glog_lines import (
    GlogLine,
    all_params,
    backward_bottom,
    backward_param,
    forward_param,
    forward_top,
)
from poseidon.net.fuse import FusedStep, Run
from poseidon.net.plan import NetPlan

Write = Callable[[GlogLine], None]


class DebugTrace:
    """Watches the passes of one net.

    Args:
        plan: how its layers are joined.
        layers: one a step.
        parameters: its learnable tensors, each once.
        write: takes the lines.
    """

    def __init__(
        self, plan: NetPlan, layers: Sequence[Layer], parameters: Sequence[nn.Parameter], write: Write
    ) -> None:
        self._plan = plan
        self._layers = layers
        self._parameters = parameters
        self._write = write
        self._diffs: dict[tuple[int, int], float] = {}

    def steps(self, runs: Sequence[Run]) -> list[FusedStep]:
        """Return the plan's steps, each of which tells what it computed."""
        return [
            FusedStep(step, run if step.layer in self._inputs() else partial(self._run, place, run))
            for place, (step, run) in enumerate(zip(self._plan.steps, runs, strict=True))
        ]

    def _inputs(self) -> set[int]:
        return {place for place, layer in enumerate(self._layers) if layer.param.type == "Input"}

    def _run(self, place: int, run: Run, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        watched = [self._watched(place, index, bottom) for index, bottom in enumerate(bottoms)]
        layer = self._layers[place]
        overwrites, layer.overwrites_bottom = layer.overwrites_bottom, False
        try:
            result = run(*watched)
        finally:
            layer.overwrites_bottom = overwrites
        param = layer.param
        tops = result if isinstance(result, tuple) else (result,)
        for name, top in zip(param.top, tops, strict=False):
            self._write(forward_top(param.name, name, mean_magnitude(top)))
        for index, blob in enumerate(layer.blobs()):
            self._write(forward_param(param.name, self._display_name(place, index), mean_magnitude(blob)))
        return result

    def _watched(self, place: int, index: int, bottom: Tensor) -> Tensor:
        if not bottom.requires_grad:
            return bottom
        mine = bottom.view_as(bottom)

        def note(gradient: Tensor) -> None:
            self._diffs[place, index] = mean_magnitude(gradient)

        mine.register_hook(note)
        return mine

    def _display_name(self, place: int, index: int) -> str:
        given = self._layers[place].param.param
        return (given[index].name if index < len(given) else "") or str(index)

    def tell_backward(self) -> None:
        """Write what the last backward pass gave, from the last layer to the first, and the norms of all blobs."""
        for place in reversed(range(len(self._layers))):
            param, blobs = self._layers[place].param, self._layers[place].sources()
            for index, name in enumerate(param.bottom):
                if (place, index) in self._diffs:
                    self._write(backward_bottom(param.name, name, self._diffs[place, index]))
            for index, blob in enumerate(blobs):
                if blob.grad is not None:
                    self._write(backward_param(param.name, index, mean_magnitude(blob.grad)))
        self._diffs.clear()
        data = [parameter.detach() for parameter in self._parameters]
        diffs = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._write(all_params(*_norms(data), *_norms(diffs)))


def _norms(tensors: Sequence[Tensor]) -> tuple[float, float]:
    """L1 and L2 norm of all values together."""
    absolute = sum(float(tensor.abs().sum()) for tensor in tensors)
    squares = sum(float(tensor.double().square().sum()) for tensor in tensors)
    return absolute, math.sqrt(squares)


def mean_magnitude(blob: Tensor) -> float:
    """Return the mean absolute value; 0 of nothing."""
    return float(blob.detach().abs().mean()) if blob.numel() else 0.0
