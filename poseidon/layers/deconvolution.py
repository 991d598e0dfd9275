"""Deconvolution, the transpose of Convolution; and Im2col, the matrix that a convolution multiplies with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from poseidon.layers.base import BlobSpec, Layer, LayerError, Shape, canonical_axis, times
from poseidon.layers.convolution import check_groups, window
from poseidon.layers.registry import register

TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    0: functional.conv_transpose1d,
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


@register("Deconvolution")
class Deconvolution(Layer):
    """Each value of the bottom adds its multiple of a learned kernel to the top: the backward pass of Convolution.

    Bottoms: N x C x S, one or more of equal shape. Tops: N x O x S', S' = stride (S - 1) + reach - 2 pad with
    reach = dilation (kernel - 1) + 1.

    Fields (convolution_param): those of Convolution.

    Blobs: weight C x O/G x K; bias O unless bias_term is false.
    """

    MAX_BOTTOMS: ClassVar[int | None] = None
    MAX_TOPS: ClassVar[int | None] = None
    EQUAL_BOTTOMS_AND_TOPS: ClassVar[bool] = True
    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.convolution_param, bottoms[0]
        if any(other != shape for other in bottoms):
            raise LayerError(f"bottoms have shapes {', '.join(map(times, bottoms))}, expected equal ones")
        self.axis = canonical_axis(param.axis, shape)
        spatial = shape[self.axis + 1 :]
        if len(spatial) not in TRANSPOSED:
            raise LayerError(
                f"bottom of shape {times(shape)} has {len(spatial)} spatial axes, expected at most 3"
            )
        self.window = window(param, len(spatial))
        self.group, outputs, channels = param.group, param.num_output, shape[self.axis]
        check_groups(channels, outputs, self.group)
        extents = self.window.spread(spatial)
        self.spatial_axes = len(spatial)
        self.allow_absent("bias")
        weight = (channels, outputs // self.group, *self.window.kernel)
        self.declare(
            BlobSpec(name="weight", shape=weight, filler=param.weight_filler),
            *([BlobSpec(name="bias", shape=(outputs,), filler=param.bias_filler)] if param.bias_term else []),
        )
        return [(*shape[: self.axis], outputs, *extents)] * len(bottoms)

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        tops = tuple(self._spread(bottom) for bottom in bottoms)
        return tops if len(tops) > 1 else tops[0]

    def _spread(self, bottom: Tensor) -> Tensor:
        lead, rest = bottom.shape[: self.axis], bottom.shape[self.axis :]
        folded, weight = bottom.reshape(math.prod(lead), *rest), self.weight
        how = (self.window.stride, self.window.pad, 0, self.group, self.window.dilation)
        if not self.spatial_axes:
            top = TRANSPOSED[0](folded.unsqueeze(-1), weight.unsqueeze(-1), self.bias, 1, 0, 0, self.group)
            return top.reshape(*lead, top.shape[1])
        top = TRANSPOSED[self.spatial_axes](folded, weight, self.bias, *how)
        return top.reshape(*lead, *top.shape[1:])


@register("Im2col")
class Im2col(Layer):
    """Each window of the bottom laid out along the channels.

    Bottom: N x C x S. Top: N x (C K) x S', with the channel slowest, then the place in the kernel; S' is Convolution's.

    Fields (convolution_param): kernel_size | kernel_h/kernel_w, stride, pad, dilation, axis.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.convolution_param, bottoms[0]
        self.axis = canonical_axis(param.axis, shape)
        spatial = shape[self.axis + 1 :]
        if not spatial:
            raise LayerError(
                f"bottom of shape {times(shape)} has no axis after {self.axis}, expected 1 or more"
            )
        self.window = window(param, len(spatial))
        self.extents = self.window.extents(spatial)
        rows = shape[self.axis] * math.prod(self.window.kernel)
        return [(*shape[: self.axis], rows, *self.extents)]

    def forward(self, bottom: Tensor) -> Tensor:
        lead = bottom.shape[: self.axis]
        folded = bottom.reshape(math.prod(lead), *bottom.shape[self.axis :])
        padding = [side for pad in reversed(self.window.pad) for side in (pad, pad)]
        folded = functional.pad(folded, padding)
        places = [self._shifted(folded, place) for place in product(*map(range, self.window.kernel))]
        return torch.stack(places, 2).reshape(*lead, -1, *self.extents)

    def _shifted(self, padded: Tensor, place: Shape) -> Tensor:
        """What lies under one place of the kernel in every window."""
        cut = tuple(
            slice(at * dilation, at * dilation + (extent - 1) * stride + 1, stride)
            for at, dilation, extent, stride in zip(
                place, self.window.dilation, self.extents, self.window.stride, strict=True
            )
        )
        return padded[(slice(None), slice(None), *cut)]
