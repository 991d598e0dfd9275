"""Deconvolution, the transpose of Convolution; and Im2col, the windows of a convolution as a
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe.layers.base import Layer, LayerError, Shape, canonical_axis, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.vision.convolution import BaseConvolution, window


@register("Deconvolution")
class Deconvolution(BaseConvolution):
    """Transposed convolution with learned kernels, the backward pass of Convolution.

    Bottoms: N x C x S, one or more of equal shape. Tops: N x O x S', S' = stride (S - 1) + reach -
    2 pad with reach = dilation (kernel - 1) + 1.

    Fields (convolution_param): as for Convolution.

    Blobs: weight C x O/G x K; bias O unless bias_term is false.
    """

    CALLS = (
        functional.conv_transpose1d,
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
    )

    def extents(self, spatial: Shape) -> Shape:
        return self.window.transposed_extents(spatial)

    def weight_shape(self, channels: int, outputs: int) -> Shape:
        return (channels, outputs // self.group, *self.window.kernel)


@register("Im2col")
class Im2col(Layer):
    """The windows of the bottom, flattened along the channels.

    Bottom: N x C x S. Top: N x (C K) x S', with the channel slowest, then the
    position in the kernel; S' as in Convolution.

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
        values = [
            self._shifted(folded, position) for position in product(*map(range, self.window.kernel))
        ]
        return torch.stack(values, 2).reshape(*lead, -1, *self.extents)

    def _shifted(self, padded: Tensor, position: Shape) -> Tensor:
        """Return the values at one position of the kernel in every window."""
        cut = tuple(
            slice(start * dilation, start * dilation + (extent - 1) * stride + 1, stride)
            for start, dilation, extent, stride in zip(
                position, self.window.dilation, self.extents, self.window.stride, strict=True
            )
        )
        return padded[(slice(None), slice(None), *cut)]
