"""Convolution and its transpose in all dimensions and orders, and with filters by place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.layers.windows import Fit, Windowed, Windows, spread
from poseidon.caffe2.operators.registry import Context, operator
from poseidon.errors import counted

DIMENSIONS = ("", "1D", "2D", "3D")


def filter_rule(maker: GradientMaker) -> None:
    """Make the gradients of the filter, of a bias, and of the input unless unwanted."""
    bias = len(maker.forward.input) == 3 and not maker.argument("no_bias", 0)
    outputs = [maker.GI(1)]
    if bias:
        outputs.append(maker.GI(2))
    if not maker.argument("no_gradient_to_input", 0):
        outputs.append(maker.GI(0))
    own: dict[str, Any] = {} if bias else {"no_bias": 1}
    maker.op(
        f"{maker.forward.type}Gradient",
        [maker.I(0), maker.I(1), maker.GO(0)],
        outputs,
        own,
        copy=True,
    )


class _Filters(Windowed):
    """An operator with a filter; each of `group` parts of the channels has its own."""

    def __init__(self, *, context: Context, group: int = 1) -> None:
        super().__init__(context=context)
        self.group = group


class _FilterGradients(_Filters):
    """The gradients of filter, bias (without `no_bias`) and input (if named)."""

    def __init__(self, *, context: Context, group: int = 1, no_bias: bool = False) -> None:
        super().__init__(context=context, group=group)
        self.bias = not no_bias
        self.input = context.outputs == (2 if no_bias else 3)

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        fit: Fit,
        padding: Sequence[int],
        more: Sequence[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the filter, and of the bias and the input if they are wanted.

        The gradient of the input is cut to its size where torch pads more than the operator.

        Args:
            dy, x, w: the gradient of the output, input and filter, in the order NCHW.
            fit: the windows.
            padding: the padding that torch is told.
            more: rows and columns that a transposed convolution adds at the end; else None.
        """
        if self.windows.last and max(fit.kernel) == 1 < max(fit.stride):
            # torch 2.13 writes over the end of the gradient of small images with channels last.
            dy, x, w = (each.clone(memory_format=torch.contiguous_format) for each in (dy, x, w))
        dx, dw, db = torch.ops.aten.convolution_backward(
            dy,
            x,
            w,
            [dy.shape[1]],
            fit.stride,
            padding,
            fit.dilation,
            more is not None,
            more or [0] * len(padding),
            self.group,
            [self.input, True, self.bias],
        )
        if self.input:
            dx = self.ordered(dx if more is not None or fit.symmetric else fit.crop(dx))
        return tuple(each for each in (self.ordered(dw), db, dx) if each is not None)


@operator(
    *(f"Conv{count}" for count in DIMENSIONS), gradient=filter_rule, expected="N _ _ *, M _ _ *, M"
)
class Conv(_Filters):
    """Cross-correlation of images with a filter; each of `group` parts has its own filters."""

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return the images of x filtered by w, plus b by channel."""
        x, w = self.images(x, w)
        _check_channels(x, w, b, self.group)
        fit = self.windows.fit(x.shape[2:], w.shape[2:])
        padding: tuple[int, ...] = fit.before
        if not fit.symmetric:
            x, padding = fit.pad(x), (0,) * len(fit.before)
        zeros = [0] * len(padding)
        return self.ordered(
            torch.convolution(x, w, b, fit.stride, padding, fit.dilation, False, zeros, self.group)
        )


def _check_channels(x: Tensor, w: Tensor, b: Tensor | None, group: int) -> None:
    if x.dim() != w.dim():
        raise ValueError(f"the input has {x.dim()} dimensions, the filter {w.dim()}")
    if x.shape[1] != w.shape[1] * group or w.shape[0] % group:
        raise ValueError(
            f"{x.shape[1]} channels in {group} groups do not fit a filter of {w.shape[0]} x "
            f"{w.shape[1]} channels"
        )
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"the bias has the shape {list(b.shape)}, the filter {w.shape[0]} outputs")


@operator(
    *(f"Conv{count}Gradient" for count in DIMENSIONS), outputs=(1, 3), shapes="N C *X, M *, N M *Y"
)
class ConvGradient(_FilterGradients):
    """The gradients of `Conv`: of filter, bias (without `no_bias`) and input (if named)."""

    def __call__(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x, w, dy = self.images(x, w, dy)
        fit = self.windows.fit(x.shape[2:], w.shape[2:])
        fit.check_gradient(dy)
        if fit.symmetric:
            return self.gradients(dy, x, w, fit, fit.before)
        return self.gradients(dy, fit.pad(x), w, fit, [0] * len(fit.before))


def _transposed_fit(windows: Windows, x: Tensor, w: Tensor) -> Fit:
    """Return the windows that the output has: their number is the size of the input."""
    count = x.dim() - 2
    heads, tails = windows.paddings(count)
    kernel = windows.kernel_of(count, tuple(w.shape[2:]))
    stride, dilation = spread(windows.stride, count), spread(windows.dilation, count)
    adjustment = spread(windows.adjustment, count)
    if any(extra >= step for extra, step in zip(adjustment, stride, strict=True) if extra):
        raise ValueError(f"adj {list(adjustment)} is not below the stride {list(stride)}")
    return Fit(kernel, stride, dilation, heads, tails, adjustment)


@operator("ConvTranspose", gradient=filter_rule, expected="N _ _ *, _ _ _ *, M")
class ConvTranspose(_Filters):
    """The transpose of a convolution; its padding is cut off; `adj` adds rows and columns."""

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return the images; the filter has input channels first."""
        x, w = self.images(x, w)
        if x.shape[1] != w.shape[0]:
            raise ValueError(f"the input has {x.shape[1]} channels, the filter {w.shape[0]}")
        fit = _transposed_fit(self.windows, x, w)
        zeros = [0] * len(fit.before)
        full = torch.convolution(
            x, w, b, fit.stride, zeros, fit.dilation, True, fit.output, self.group
        )
        return self.ordered(fit.crop(full))


@operator("ConvTransposeGradient", outputs=(1, 3), expected="N _ _ *, _ _ _ *, N _ _ *")
class ConvTransposeGradient(_FilterGradients):
    """The gradients of `ConvTranspose`, as `ConvGradient` gives them."""

    def __call__(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x, w, dy = self.images(x, w, dy)
        fit = _transposed_fit(self.windows, x, w)
        fit.check_transposed(x, dy)
        return self.gradients(fit.pad(dy), x, w, fit, [0] * len(fit.before), fit.output)


class _Columns(Windowed):
    """An operator over windows whose padding is the same on all sides: it knows only `pad`."""

    def __init__(self, *, context: Context) -> None:
        super().__init__(context=context)
        self.windows.pads = ()


@operator("Im2Col", gradient="Col2Im(GO0, I0) -> GI0", expected="N C H W")
class Im2Col(_Columns):
    """Windows of images as columns: N x (C kh kw) x oh x ow; in NHWC N x oh x ow x (kh kw C)."""

    def __call__(self, x: Tensor) -> Tensor:
        last = self.windows.last
        (images,) = self.images(x)
        fit = self.windows.fit(images.shape[2:])
        columns = functional.unfold(fit.pad(images), fit.kernel, fit.dilation, 0, fit.stride)
        if not last:
            return columns.reshape(*columns.shape[:2], *fit.output)
        parts = columns.reshape(x.shape[0], x.shape[-1], -1, *fit.output)
        return parts.permute(0, 3, 4, 2, 1).flatten(3)


@operator("Col2Im", gradient="Im2Col(GO0) -> GI0", expected="N _ _ _, N _ _ _")
class Col2Im(_Columns):
    """Images of the shape of the second input: the sum of the columns where their windows lie."""

    def __call__(self, columns: Tensor, like: Tensor) -> Tensor:
        shape = self.images(like)[0].shape
        fit = self.windows.fit(shape[2:])
        if self.windows.last:
            parts = columns.reshape(shape[0], *fit.output, -1, shape[1])
            columns = parts.permute(0, 4, 3, 1, 2)
        size = tuple(sum(sides) for sides in zip(shape[2:], fit.before, fit.after, strict=True))
        flat = columns.reshape(shape[0], -1, fit.output[0] * fit.output[1])
        images = functional.fold(flat, size, fit.kernel, fit.dilation, 0, fit.stride)
        return self.ordered(fit.crop(images))


def _filtered_by_place(op: _Filters, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return the images of x filtered by w, plus b.

    Args:
        op: `LC`, or its gradient.
        x: images.
        w: (output sizes, outputs, a group's inputs, kernel sizes); inputs are last in NHWC.
        b: (output sizes, outputs).
    """
    count = x.dim() - 2
    if w.dim() != 2 * count + 2:
        raise ValueError(
            f"the filters have {counted(w.dim(), 'dimension')}, expected {2 * count + 2} for "
            f"an input of {x.dim()}"
        )
    (x,) = op.images(x)
    if op.windows.last:
        w = w.movedim(-1, count + 1)
    fit = op.windows.fit(x.shape[2:], w.shape[count + 2 :])
    expected = (*fit.output, w.shape[count], x.shape[1] // op.group, *fit.kernel)
    if w.shape != expected:
        raise ValueError(f"the filters have the shape {list(w.shape)}, not {list(expected)}")
    parts = fit.pad(x)
    for axis in range(count):
        reach = fit.dilation[axis] * (fit.kernel[axis] - 1) + 1
        parts = parts.unfold(2 + axis, reach, fit.stride[axis])[..., :: fit.dilation[axis]]
    images, outputs = x.shape[0], w.shape[count]
    rows = parts.reshape(images, op.group, x.shape[1] // op.group, *parts.shape[2:])
    rows = rows.movedim(2, 2 + count).flatten(2, 1 + count).flatten(3)
    filters = w.reshape(rows.shape[2], op.group, outputs // op.group, rows.shape[3])
    y = torch.einsum("ngok,ogmk->ngmo", rows, filters).reshape(images, outputs, *fit.output)
    if b is not None:
        if tuple(b.shape) != (*fit.output, outputs):
            wanted = (*fit.output, outputs)
            raise ValueError(f"the bias has the shape {tuple(b.shape)}, expected {wanted}")
        y = y + b.movedim(-1, 0)
    return op.ordered(y)


@operator(*(f"LC{count}" for count in DIMENSIONS), gradient=filter_rule, expected="N _ _ *")
class LC(_Filters):
    """A convolution with a filter and a bias for each place of the output."""

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return _filtered_by_place(self, x, w, b)


@operator(
    *(f"LC{count}Gradient" for count in DIMENSIONS), outputs=(1, 3), expected="N _ _ *, ?, N _ _ *"
)
class LCGradient(_FilterGradients):
    """The gradients of `LC`: of filters, bias (without `no_bias`) and input (if named)."""

    def __call__(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            images, filters = x.detach().requires_grad_(self.input), w.detach().requires_grad_()
            wanted = [filters, *([images] if self.input else [])]
            y = _filtered_by_place(self, images, filters, None)
            dw, *dx = torch.autograd.grad(y, wanted, dy)
        if not self.bias:
            return (dw, *dx)
        by_place = dy.sum(0)
        return (dw, by_place if self.windows.last else by_place.movedim(0, -1).contiguous(), *dx)
