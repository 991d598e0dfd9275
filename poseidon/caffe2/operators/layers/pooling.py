"""Pooling: maximum, mean and p-norm of windows, in any number of dimensions and both orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.layers.windows import Fit, Windowed
from poseidon.caffe2.operators.registry import Context, operator
from poseidon.errors import counted

DIMENSIONS = ("", "1D", "2D", "3D")
MOST_DIMENSIONS = 5
"""The dimensions of images of three dimensions, with the batch and the channels."""
RULE = "@Gradient(I0, O0, GO0) -> GI0"
_MAXIMA = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}


def _sums(x: Tensor, fit: Fit) -> Tensor:
    """Return the sum of each window of a padded input."""
    if x.dim() == 5:
        return functional.avg_pool3d(x, fit.kernel, fit.stride, divisor_override=1)
    if x.dim() == 4:
        return functional.avg_pool2d(x, fit.kernel, fit.stride, divisor_override=1)
    flat = functional.avg_pool2d(
        x.unsqueeze(2), (1, *fit.kernel), (1, *fit.stride), divisor_override=1
    )
    return flat.squeeze(2)


def _spread_sums(dy: Tensor, like: Tensor, fit: Fit) -> Tensor:
    """Return for each element of a padded input the sum of dy over the windows that it is in."""
    if like.dim() == 3:
        wide = Fit(
            (1, *fit.kernel),
            (1, *fit.stride),
            (1, 1),
            (0, *fit.before),
            (0, *fit.after),
            (1, *fit.output),
        )
        return _spread_sums(dy.unsqueeze(2), like.unsqueeze(2), wide).squeeze(2)
    backward = (
        torch.ops.aten.avg_pool3d_backward
        if like.dim() == 5
        else torch.ops.aten.avg_pool2d_backward
    )
    zeros = [0] * len(fit.kernel)
    result: Tensor = backward(dy.contiguous(), like, fit.kernel, fit.stride, zeros, False, True, 1)
    return result


def _counts(images: Sequence[int], fit: Fit, like: Tensor) -> Tensor:
    """Return the number of each window's elements in the image, as a tensor that broadcasts."""
    total = torch.ones((), dtype=like.dtype, device=like.device)
    for axis, size in enumerate(images):
        starts = (
            torch.arange(fit.output[axis], device=like.device) * fit.stride[axis] - fit.before[axis]
        )
        inside = (starts + fit.kernel[axis]).clamp(max=size) - starts.clamp(min=0)
        shape = [1] * len(images)
        shape[axis] = -1
        total = total * inside.clamp(min=1).to(like.dtype).reshape(shape)
    return total


class _Pool(Windowed):
    """An operator on windows of images of 1, 2 or 3 dimensions."""

    def check_dense(self) -> None:
        """Raise ValueError for dilated windows."""
        if max(self.windows.dilation) > 1:
            raise ValueError(f"only MaxPool takes a dilation; it is {list(self.windows.dilation)}")

    def images(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors in the order NCHW.

        Raises:
            ValueError: these are not images of 1, 2 or 3 dimensions.
        """
        if not 3 <= tensors[0].dim() <= MOST_DIMENSIONS:
            raise ValueError(
                f"the input has {counted(tensors[0].dim(), 'dimension')}, expected 3 to "
                f"{MOST_DIMENSIONS}"
            )
        return super().images(*tensors)


@operator(*(f"MaxPool{count}" for count in DIMENSIONS), gradient=RULE, expected="N _ _ *")
class MaxPool(_Pool):
    """The maximum of each window."""

    def __call__(self, x: Tensor) -> Tensor:
        (x,) = self.images(x)
        if self.windows.whole:
            return self.ordered(x.amax(tuple(range(2, x.dim())), keepdim=True))
        fit = self.windows.fit(x.shape[2:])
        simple = fit.symmetric and all(
            2 * p <= k for p, k in zip(fit.before, fit.kernel, strict=True)
        )
        padding: tuple[int, ...] = fit.before
        if not simple:
            x, padding = fit.pad(x, float("-inf")), (0,) * len(fit.before)
        return self.ordered(_MAXIMA[x.dim() - 2](x, fit.kernel, fit.stride, padding, fit.dilation))


@operator(*(f"MaxPool{count}Gradient" for count in DIMENSIONS), shapes="N C *X, N C *Y, N C *Y")
class MaxPoolGradient(_Pool):
    """The gradient of `MaxPool`: all elements that equal a window's maximum get its gradient."""

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
        x, y, dy = self.images(x, y, dy)
        if self.windows.whole:
            return self.ordered(torch.where(x == y, dy, 0))
        fit = self.windows.fit(x.shape[2:])
        fit.check_gradient(dy)
        padded = fit.pad(x, float("-inf"))
        dx = torch.zeros_like(padded)
        for offsets in product(*map(range, fit.kernel)):
            part = [slice(None), slice(None)]
            for offset, step, stretch, count in zip(
                offsets, fit.stride, fit.dilation, fit.output, strict=True
            ):
                start = offset * stretch
                part.append(slice(start, start + (count - 1) * step + 1, step))
            dx[tuple(part)] += torch.where(padded[tuple(part)] == y, dy, 0)
        return self.ordered(fit.crop(dx))


@operator(*(f"AveragePool{count}" for count in DIMENSIONS), gradient=RULE, expected="N _ _ *")
class AveragePool(_Pool):
    """The mean of each window's part in the image, or with zeros (`count_include_pad`)."""

    def __init__(self, *, context: Context, count_include_pad: bool = False) -> None:
        super().__init__(context=context)
        self.check_dense()
        self.include = count_include_pad

    def __call__(self, x: Tensor) -> Tensor:
        (x,) = self.images(x)
        if self.windows.whole:
            return self.ordered(x.mean(tuple(range(2, x.dim())), keepdim=True))
        fit = self.windows.fit(x.shape[2:])
        return self.ordered(_sums(fit.pad(x), fit) / self.divisor(x, fit))

    def divisor(self, x: Tensor, fit: Fit) -> Tensor | int:
        """Return what the sums of the windows are divided by."""
        if self.include or not (any(fit.before) or any(fit.after)):
            return int(torch.Size(fit.kernel).numel())
        return _counts(x.shape[2:], fit, x)


@operator(*(f"AveragePool{count}Gradient" for count in DIMENSIONS), shapes="N C *X, N C *Y, N C *Y")
class AveragePoolGradient(AveragePool):
    """The gradient of `AveragePool`."""

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:  # type: ignore[override]
        x, dy = self.images(x, dy)
        if self.windows.whole:
            count = max(x.shape[2:].numel(), 1)
            return self.ordered((dy / count).expand(x.shape))
        fit = self.windows.fit(x.shape[2:])
        fit.check_gradient(dy)
        return self.ordered(fit.crop(_spread_sums(dy / self.divisor(x, fit), fit.pad(x), fit)))


@operator("LpPool", gradient=RULE, expected="N _ _ *")
class LpPool(_Pool):
    """The p-norm of each window."""

    def __init__(self, *, context: Context, p: float = 2.0) -> None:
        super().__init__(context=context)
        self.check_dense()
        self.p = p

    def __call__(self, x: Tensor) -> Tensor:
        (x,) = self.images(x)
        fit = self.windows.fit(x.shape[2:])
        return self.ordered(_sums(fit.pad(x.abs() ** self.p), fit) ** (1 / self.p))


@operator("LpPoolGradient", shapes="N C *X, N C *Y, N C *Y")
class LpPoolGradient(LpPool):
    """The gradient of `LpPool`."""

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:  # type: ignore[override]
        x, y, dy = self.images(x, y, dy)
        fit = self.windows.fit(x.shape[2:])
        fit.check_gradient(dy)
        shares = fit.crop(_spread_sums(dy * y ** (1 - self.p), fit.pad(x), fit))
        return self.ordered(shares * x * x.abs() ** (self.p - 2))
