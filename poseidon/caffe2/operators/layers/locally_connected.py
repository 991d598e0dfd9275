"""Locally connected layers: convolutions whose filter is another one at each place."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.layers.convolution import DIMENSIONS, filter_rule
from poseidon.caffe2.operators.layers.windows import Windows, channels_last, channels_second
from poseidon.caffe2.operators.registry import Context, operator
from poseidon.errors import counted


class _Local:
    """What `LC` and its gradient share."""

    def __init__(self, *, context: Context, group: int = 1) -> None:
        self.windows = Windows(context.definition)
        self.group = group

    def apply(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Return the images of x filtered by w, plus b.

        Args:
            x: images.
            w: (output sizes, outputs, inputs of a group, kernel sizes); the inputs are last in the
                order NHWC.
            b: (output sizes, outputs).
        """
        count = x.dim() - 2
        if w.dim() != 2 * count + 2:
            raise ValueError(
                f"the filters have {counted(w.dim(), 'dimension')}, expected {2 * count + 2} for "
                f"an input of {x.dim()}"
            )
        if self.windows.last:
            x = channels_second(x)
            w = w.movedim(-1, count + 1)
        fit = self.windows.fit(x.shape[2:], w.shape[count + 2 :])
        expected = (*fit.output, w.shape[count], x.shape[1] // self.group, *fit.kernel)
        if w.shape != expected:
            raise ValueError(
                f"the filters have the shape {list(w.shape)}, {list(expected)} expected"
            )
        parts = fit.pad(x)
        for axis in range(count):
            reach = fit.dilation[axis] * (fit.kernel[axis] - 1) + 1
            parts = parts.unfold(2 + axis, reach, fit.stride[axis])[..., :: fit.dilation[axis]]
        images, outputs = x.shape[0], w.shape[count]
        rows = parts.reshape(images, self.group, x.shape[1] // self.group, *parts.shape[2:])
        rows = rows.movedim(2, 2 + count).flatten(2, 1 + count).flatten(3)
        filters = w.reshape(rows.shape[2], self.group, outputs // self.group, rows.shape[3])
        y = torch.einsum("ngok,ogmk->ngmo", rows, filters).reshape(images, outputs, *fit.output)
        if b is not None:
            if tuple(b.shape) != (*fit.output, outputs):
                wanted = (*fit.output, outputs)
                raise ValueError(f"the bias has the shape {tuple(b.shape)}, expected {wanted}")
            y = y + b.movedim(-1, 0)
        return channels_last(y) if self.windows.last else y


@operator(*(f"LC{count}" for count in DIMENSIONS), gradient=filter_rule, expected="N _ _ *")
class LC(_Local):
    """A convolution with a filter and a bias for each place of the output."""

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return self.apply(x, w, b)


@operator(
    *(f"LC{count}Gradient" for count in DIMENSIONS), outputs=(1, 3), expected="N _ _ *, ?, N _ _ *"
)
class LCGradient(_Local):
    """The gradients of `LC`: of the filters, of the bias (without `no_bias`), of the input where
    it is named.
    """

    def __init__(self, *, context: Context, group: int = 1, no_bias: bool = False) -> None:
        super().__init__(context=context, group=group)
        self.bias = not no_bias
        self.input = context.outputs == (2 if no_bias else 3)

    def __call__(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            images, filters = x.detach().requires_grad_(self.input), w.detach().requires_grad_()
            wanted = [filters, *([images] if self.input else [])]
            y = self.apply(images, filters, None)
            dw, *dx = torch.autograd.grad(y, wanted, dy)
        if not self.bias:
            return (dw, *dx)
        by_place = dy.sum(0)
        return (dw, by_place if self.windows.last else by_place.movedim(0, -1).contiguous(), *dx)
