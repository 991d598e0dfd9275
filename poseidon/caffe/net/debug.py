"""`debug_info`: the mean absolute values of all blobs in each pass, in the log lines of Caffe's
Net.

    [Forward] Layer conv1, top blob conv1 data: 0.0645037 [Forward] Layer conv1, param blob 0 data:
    0.00899114 [Backward] Layer loss, bottom blob fc1 diff: 0.00336934 [Backward] Layer fc1, param
    blob 0 diff: 0.000912 [Backward] All net params (data, diff): L1 norm = (2711.42, 7086.66); L2
    norm = (6.11659, 4085.07)

Law: the trace changes no result. The diff of a bottom is the contribution of this layer, also if
other layers read the same blob: Caffe's Split copies have separate diffs, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from poseidon.caffe.layers.base import Layer
from poseidon.caffe.net.fuse import FusedStep, Run
from poseidon.caffe.net.net_plan import NetPlan
from poseidon.observe.metrics.glog_lines import (
    GlogLine,
    all_params,
    backward_bottom,
    backward_param,
    forward_param,
    forward_top,
)

Write = Callable[[GlogLine], None]


class DebugTrace:
    """A trace of the passes of a net.

    Args:
        layers: the layers, one for each step.
        parameters: the learnable tensors, without duplicates.
    """

    def __init__(
        self,
        plan: NetPlan,
        layers: Sequence[Layer],
        parameters: Sequence[nn.Parameter],
        write: Write,
    ) -> None:
        self._plan = plan
        self._layers = layers
        self._parameters = parameters
        self._write = write
        self._diffs: dict[tuple[int, int], float] = {}

    def steps(self, runs: Sequence[Run]) -> list[FusedStep]:
        """Return the plan's steps, wrapped so that each logs its tops and blobs."""
        return [
            FusedStep(
                step, run if step.layer in self._inputs() else partial(self._run, position, run)
            )
            for position, (step, run) in enumerate(zip(self._plan.steps, runs, strict=True))
        ]

    def _inputs(self) -> set[int]:
        return {
            position for position, layer in enumerate(self._layers) if layer.param.type == "Input"
        }

    def _run(self, position: int, run: Run, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        hooked = [self._with_hook(position, index, bottom) for index, bottom in enumerate(bottoms)]
        layer = self._layers[position]
        overwrites, layer.overwrites_bottom = layer.overwrites_bottom, False
        try:
            result = run(*hooked)
        finally:
            layer.overwrites_bottom = overwrites
        param = layer.param
        tops = result if isinstance(result, tuple) else (result,)
        for name, top in zip(param.top, tops, strict=False):
            self._write(forward_top(param.name, name, mean_magnitude(top)))
        for index, blob in enumerate(layer.blobs()):
            self._write(
                forward_param(param.name, self._display_name(position, index), mean_magnitude(blob))
            )
        return result

    def _with_hook(self, position: int, index: int, bottom: Tensor) -> Tensor:
        if not bottom.requires_grad:
            return bottom
        view = bottom.view_as(bottom)

        def record(gradient: Tensor) -> None:
            self._diffs[position, index] = mean_magnitude(gradient)

        view.register_hook(record)
        return view

    def _display_name(self, position: int, index: int) -> str:
        specs = self._layers[position].param.param
        return (specs[index].name if index < len(specs) else "") or str(index)

    def log_backward(self) -> None:
        """Log the diffs of the last backward pass, from the last layer to the first, and the
        norms of all blobs.
        """
        for position in reversed(range(len(self._layers))):
            param, blobs = self._layers[position].param, self._layers[position].sources()
            for index, name in enumerate(param.bottom):
                if (position, index) in self._diffs:
                    self._write(backward_bottom(param.name, name, self._diffs[position, index]))
            for index, blob in enumerate(blobs):
                if blob.grad is not None:
                    self._write(backward_param(param.name, index, mean_magnitude(blob.grad)))
        self._diffs.clear()
        data = [parameter.detach() for parameter in self._parameters]
        diffs = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._write(all_params(*norms(data), *norms(diffs)))


def norms(tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Return the L1 and L2 norms over all tensors."""
    absolute = sum(float(tensor.abs().sum()) for tensor in tensors)
    squares = sum(float(tensor.double().square().sum()) for tensor in tensors)
    return absolute, math.sqrt(squares)


def mean_magnitude(blob: Tensor) -> float:
    """Return the mean absolute value, 0 for an empty tensor."""
    return float(blob.detach().abs().mean()) if blob.numel() else 0.0
