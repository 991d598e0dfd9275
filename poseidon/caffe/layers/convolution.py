"""Convolution over one, two or three spatial axes (and over none, as in Caffe).

Shape letters: N batch (every axis before `axis`), C channels, S the spatial axes, O num_output, G
group, K kernel.

Deconvolution, the transpose of Convolution; and Im2col, the windows of a convolution as a
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from poseidon.caffe.layers.base import (
    BlobSpec,
    Layer,
    LayerError,
    Shape,
    canonical_axis,
    check_positive,
    once_or,
    optional_bias,
    times,
)
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import ConvolutionParameter

Convolve = Callable[..., Tensor]
MOST_SPATIAL_AXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The kernel's extents, stride, padding and dilation on each spatial axis."""

    kernel: Shape
    stride: Shape
    pad: Shape
    dilation: Shape

    def extents(self, spatial: Sequence[int]) -> Shape:
        """Return the extents of the output: floor((S + 2 pad - (dilation (kernel - 1) + 1)) /
        stride) + 1.

        Raises:
            LayerError: the kernel is larger than the padded input.
        """
        reach = tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        padded = tuple(extent + 2 * p for extent, p in zip(spatial, self.pad, strict=True))
        if any(r > extent for r, extent in zip(reach, padded, strict=True)):
            dilated = (
                f" ({times(reach)} with dilation {times(self.dilation)})"
                if reach != self.kernel
                else ""
            )
            raise LayerError(
                f"kernel {times(self.kernel)}{dilated} larger than padded input {times(padded)}"
            )
        return tuple((e - r) // s + 1 for e, r, s in zip(padded, reach, self.stride, strict=True))

    def transposed_extents(self, spatial: Sequence[int]) -> Shape:
        """Return the extents of Deconvolution's output: stride (S - 1) + reach - 2 pad.

        Raises:
            LayerError: an extent is below 1.
        """
        extents = tuple(
            s * (extent - 1) + d * (k - 1) + 1 - 2 * p
            for extent, k, s, p, d in zip(
                spatial, self.kernel, self.stride, self.pad, self.dilation, strict=True
            )
        )
        if min(extents, default=1) < 1:
            raise LayerError(
                f"pad {times(self.pad)} is too large: the output would have extents {list(extents)}"
            )
        return extents


# A window of one value on one axis.
POINT = Window(kernel=(1,), stride=(1,), pad=(0,), dilation=(1,))


def window(param: ConvolutionParameter, axes: int) -> Window:
    """Read kernel, stride, pad and dilation for `axes` spatial axes: each one for
    all, one for each axis, or as _h and _w.

    Raises:
        LayerError: a setting occurs in two forms or a wrong number of times, or is illegally zero.
    """
    result = Window(
        kernel=_per_axis(param, "kernel_size", "kernel", axes, None),
        stride=_per_axis(param, "stride", "stride", axes, 1),
        pad=_per_axis(param, "pad", "pad", axes, 0),
        dilation=_dilation(param, axes),
    )
    for name, values in (
        ("kernel_size", result.kernel),
        ("stride", result.stride),
        ("dilation", result.dilation),
    ):
        if min(values, default=1) < 1:
            raise LayerError(f"{name} is {times(values)}, expected at least 1 on each axis")
    return result


def _dilation(param: ConvolutionParameter, axes: int) -> Shape:
    """Return `dilation`, or the `hole` of other branches, which means the same."""
    sides = param.HasField("hole_h") or param.HasField("hole_w")
    if not (param.HasField("hole") or sides):
        return _repeated("dilation", param.dilation, axes, 1)
    if param.dilation or (param.HasField("hole") and sides):
        raise LayerError("has several of dilation, hole and hole_h/hole_w, expected one of them")
    if not sides:
        return _repeated("hole", [param.hole], axes, 1)
    if axes != 2:
        raise LayerError(
            f"hole_h and hole_w are for 2 spatial axes, the bottom has {axes}; use dilation"
        )
    return (param.hole_h, param.hole_w)


def _per_axis(
    param: ConvolutionParameter, name: str, stem: str, axes: int, default: int | None
) -> Shape:
    """Return the values of field `name`, or `<stem>_h` and `<stem>_w` of two spatial axes."""
    repeated = list(getattr(param, name))
    tall, wide = f"{stem}_h", f"{stem}_w"
    if not (param.HasField(tall) or param.HasField(wide)):
        return _repeated(name, repeated, axes, default)
    if axes != 2:
        raise LayerError(
            f"{tall} and {wide} are for 2 spatial axes, the bottom has {axes}; use {name}"
        )
    if repeated:
        raise LayerError(f"has both {name} and {tall}/{wide}, expected one of them")
    if default is None and not (param.HasField(tall) and param.HasField(wide)):
        raise LayerError(f"has only one of {tall} and {wide}, expected both")
    unset = default or 0
    return tuple(getattr(param, side) if param.HasField(side) else unset for side in (tall, wide))


def _repeated(name: str, values: Sequence[int], axes: int, default: int | None) -> Shape:
    """Return a value for each axis, from one for each, one for all, or the default."""
    if not values and default is None and axes:
        raise LayerError(f"missing {name}")
    if len(values) <= 1:
        return tuple(values or (default or 0,)) * axes
    if len(values) != axes:
        raise LayerError(f"{name} occurs {len(values)} times, expected {once_or(axes)}")
    return tuple(values)


class BaseConvolution(Layer):
    """The base of Convolution and Deconvolution: bottoms of one shape, window, groups, kernels.

    A subclass defines torch's functions, the kernels' shape and the tops' extents.
    """

    takes_any_form = True
    BOTTOMS = (1, None)
    TOPS = (1, None)
    EQUAL_BOTTOMS_AND_TOPS = True
    TOPS_MAY_BE_OVERWRITTEN = True
    CALLS: ClassVar[tuple[Convolve, ...]]
    """torch's function for 0, 1, 2 and 3 spatial axes. 0 axes are one of extent 1."""
    weight: nn.Parameter
    bias: nn.Parameter | None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.convolution_param, bottoms[0]
        if any(other != shape for other in bottoms):
            raise LayerError(
                f"bottoms have shapes {', '.join(map(times, bottoms))}, expected equal shapes"
            )
        self.axis = canonical_axis(param.axis, shape)
        spatial = shape[self.axis + 1 :]
        if len(spatial) > MOST_SPATIAL_AXES:
            raise LayerError(
                f"bottom of shape {times(shape)} has {len(spatial)} spatial axes, expected at "
                f"most {MOST_SPATIAL_AXES}"
            )
        self.window = window(param, len(spatial))
        outputs, channels = param.num_output, shape[self.axis]
        self.group = self.groups(channels)
        check_positive(param, "num_output")
        check_groups(channels, outputs, self.group)
        extents = self.extents(spatial)
        self.pointwise = not spatial
        # Computed once, so that forward has no decisions to make.
        self.plain = self.axis == 1 and not self.pointwise
        self.call = self.torch_call(len(spatial))
        self.allow_absent("bias")
        self.declare(
            BlobSpec(
                name="weight",
                shape=self.weight_shape(channels, outputs),
                filler=param.weight_filler,
            ),
            *optional_bias(param),
        )
        return [(*shape[: self.axis], outputs, *extents)] * len(bottoms)

    def groups(self, channels: int) -> int:
        """Return the number of groups of channels."""
        return self.param.convolution_param.group

    def extents(self, spatial: Shape) -> Shape:
        """Return the spatial extents of the tops."""
        raise NotImplementedError

    def weight_shape(self, channels: int, outputs: int) -> Shape:
        """Return the shape of the kernels."""
        raise NotImplementedError

    def torch_call(self, axes: int) -> Convolve:
        """Return the function of bottom N x C x S, weight and bias for so many
        spatial axes.
        """
        shape = self.window if axes else POINT
        return partial(
            self.CALLS[axes],
            stride=shape.stride,
            padding=shape.pad,
            dilation=shape.dilation,
            groups=self.group,
        )

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        tops = tuple(self._apply_kernels(bottom) for bottom in bottoms)
        return tops if len(tops) > 1 else tops[0]

    def _apply_kernels(self, bottom: Tensor) -> Tensor:
        if self.plain:
            return self.call(bottom, self.weight, self.bias)
        lead, rest = bottom.shape[: self.axis], bottom.shape[self.axis :]
        folded = bottom.reshape(math.prod(lead), *rest)
        weight: Tensor = self.weight
        if self.pointwise:
            folded, weight = folded.unsqueeze(-1), weight.unsqueeze(-1)
        top = self.call(folded, weight, self.bias)
        return top.reshape(*lead, *(top.shape[1:2] if self.pointwise else top.shape[1:]))


@register("Convolution")
class Convolution(BaseConvolution):
    """Cross-correlation with learned kernels.

    Top i is computed from bottom i, with the same kernels for all.

    Bottoms: N x C x S, one or more of equal shape. Tops: N x O x S', S' = floor((S + 2 pad - reach)
    / stride) + 1 with reach = dilation (kernel - 1) + 1.

    Fields (convolution_param): num_output, bias_term, kernel_size | kernel_h/kernel_w, stride |
    stride_h/stride_w, pad | pad_h/pad_w, dilation | hole | hole_h/hole_w, group, axis,
    weight_filler, bias_filler. `engine` and `force_nd_im2col` choose between Caffe's
    implementations and have no effect.

    Blobs: weight O x C/G x K; bias O unless bias_term is false.
    """

    CALLS = (functional.conv1d, functional.conv1d, functional.conv2d, functional.conv3d)

    def extents(self, spatial: Shape) -> Shape:
        return self.window.extents(spatial)

    def weight_shape(self, channels: int, outputs: int) -> Shape:
        return (outputs, channels // self.group, *self.window.kernel)


@register("DepthwiseConvolution")
class DepthwiseConvolution(Convolution):
    """Convolution, as a faster one for many groups is called in branches of Caffe."""


@register("HoleConvolution")
class HoleConvolution(Convolution):
    """Convolution, as in PSPNet's branch of Caffe, with fields hole, hole_h and hole_w."""


@register("ConvolutionDepthwise")
class ConvolutionDepthwise(Convolution):
    """Convolution by channel (MobileNet, Howard et al., 2017); `group` is the number of channels.

    Blobs: weight O x 1 x K; bias O unless bias_term is false.
    """

    def groups(self, channels: int) -> int:
        return channels


def check_groups(channels: int, outputs: int, group: int) -> None:
    """Raise LayerError unless `group` divides the channels and the outputs."""
    if group < 1:
        raise LayerError(f"group is {group}, expected at least 1")
    if channels % group:
        raise LayerError(f"bottom has {channels} channels, expected a multiple of group {group}")
    if outputs % group:
        raise LayerError(f"num_output is {outputs}, expected a multiple of group {group}")


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
