"""The geometry of sliding windows: kernels, strides, dilations, paddings of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.registry import Context
from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef

VALID, SAME, CAFFE = 1, 2, 3
"""Values of `legacy_pad`: no padding; padding to ceil(input / stride) outputs; Caffe's pooling,
which rounds up.
"""


@dataclass(frozen=True, slots=True)
class Fit:
    """Windows fitted to the image sizes of one input.

    Attributes:
        kernel, stride, dilation: sizes by image dimension.
        before, after: the padding by image dimension; it may be negative.
        output: the number of windows by image dimension.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether the padding is the same on both sides, and not negative."""
        return self.before == self.after and min(self.before, default=0) >= 0

    def pad(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Return an input, channels second, with its padding."""
        if not any(self.before) and not any(self.after):
            return x
        pairs = list(zip(self.before, self.after, strict=True))
        return functional.pad(x, [size for pair in reversed(pairs) for size in pair], value=value)

    def crop(self, x: Tensor) -> Tensor:
        """Return a padded tensor without its padding."""
        if not any(self.before) and not any(self.after):
            return x
        pairs = list(zip(self.before, self.after, strict=True))
        return functional.pad(x, [-size for pair in reversed(pairs) for size in pair])

    def check_gradient(self, dy: Tensor) -> None:
        """Raise ValueError for a gradient, channels second, without one value for each window."""
        if tuple(dy.shape[2:]) != self.output:
            raise ValueError(f"the gradient has {tuple(dy.shape[2:])} windows, not {self.output}")

    def check_transposed(self, x: Tensor, dy: Tensor) -> None:
        """Raise ValueError for a gradient without the size of x's transposed convolution.

        `output` is the adjustment here.
        """
        sides = zip(
            x.shape[2:],
            self.kernel,
            self.stride,
            self.dilation,
            self.before,
            self.after,
            self.output,
            strict=True,
        )
        expected = tuple(
            (size - 1) * stride + dilation * (kernel - 1) + 1 + more - head - tail
            for size, kernel, stride, dilation, head, tail, more in sides
        )
        if tuple(dy.shape[2:]) != expected:
            raise ValueError(f"the gradient has the size {tuple(dy.shape[2:])}, not {expected}")


class Windows:
    """The windows that the arguments of an operator describe.

    The arguments are `kernel`, `kernel_h` and `kernel_w`, or the list `kernels`; `stride`,
    `dilation` and `adj` likewise; `pad`, `pad_t`, `pad_l`, `pad_b` and `pad_r`, or the list `pads`
    (all starts, then all ends); `legacy_pad`, `global_pooling` and `order`. Sizes for single sides
    count only where the sizes of all sides are given.
    """

    def __init__(self, definition: OperatorDef) -> None:
        given = {argument.name: argument for argument in definition.arg}

        def number(name: str, default: int = 0) -> int:
            return given[name].i if name in given else default

        def sizes(name: str, plural: str, default: int) -> tuple[int, ...]:
            if plural in given and given[plural].ints:
                return tuple(given[plural].ints)
            if f"{name}_h" in given and f"{name}_w" in given:
                return number(f"{name}_h", default), number(f"{name}_w", default)
            return (number(name, default),)

        self.kernel = sizes("kernel", "kernels", 0)
        self.stride = sizes("stride", "strides", 1)
        self.dilation = sizes("dilation", "dilations", 1)
        self.adjustment = sizes("adj", "adjs", 0)
        self.pads = tuple(given["pads"].ints) if "pads" in given else ()
        if all(f"pad_{side}" in given for side in "tlbr"):
            self.pads = tuple(number(f"pad_{side}") for side in "tlbr")
        self.pad = number("pad")
        self.legacy = number("legacy_pad")
        self.whole = bool(number("global_pooling"))
        order = given["order"].s.upper() if "order" in given else b"NCHW"
        if order not in (b"NCHW", b"NHWC"):
            raise ValueError(f"{definition.type}: the order is {order!r}, expected NCHW or NHWC")
        self.last = order == b"NHWC"
        self._fits: dict[Any, Fit] = {}
        crops = definition.type.startswith("PadImage")
        negative = not crops and min([self.pad, *self.pads]) < 0
        if min(self.stride) < 1 or min(self.dilation) < 1 or negative:
            raise ValueError(f"{definition.type}: stride or dilation below 1, or padding below 0")

    def fit(self, images: Sequence[int], kernel: Sequence[int] | None = None) -> Fit:
        """Return the windows for images of a size.

        Args:
            images: the sizes of the images, by dimension.
            kernel: the sizes of the filter, where there is one.

        Raises:
            ValueError: the arguments do not fit the number of dimensions, the filter or the images.
        """
        key = (tuple(images), None if kernel is None else tuple(kernel))
        if key not in self._fits:
            self._fits[key] = self._fit(*key)
        return self._fits[key]

    def _fit(self, images: tuple[int, ...], filters: tuple[int, ...] | None) -> Fit:
        count = len(images)
        if self.whole:
            ones, zeros = (1,) * count, (0,) * count
            return Fit(images, ones, ones, zeros, zeros, ones)
        kernel = self.kernel_of(count, filters)
        stride, dilation = spread(self.stride, count), spread(self.dilation, count)
        heads, tails = self.paddings(count)
        found = [
            self._along(*sizes)
            for sizes in zip(images, kernel, stride, dilation, heads, tails, strict=True)
        ]
        before, after, output = (tuple(one[part] for one in found) for part in range(3))
        return Fit(kernel, stride, dilation, before, after, output)

    def kernel_of(self, count: int, filters: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the kernel for a number of image dimensions; it must match the filter."""
        if self.kernel == (0,) and filters is not None:
            return filters
        kernel = spread(self.kernel, count)
        if min(kernel) < 1:
            raise ValueError(f"a kernel of {list(kernel)} has no windows")
        if filters is not None and kernel != filters:
            raise ValueError(f"the filter has the size {list(filters)}, the kernel {list(kernel)}")
        return kernel

    def paddings(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the padding before and after, by dimension, as the arguments give it."""
        if self.legacy == VALID or (self.legacy == SAME):
            return (0,) * count, (0,) * count
        if not self.pads:
            return (self.pad,) * count, (self.pad,) * count
        if len(self.pads) == count:
            return self.pads, self.pads
        if len(self.pads) != 2 * count:
            raise ValueError(f"{len(self.pads)} paddings are given, {2 * count} expected")
        return self.pads[:count], self.pads[count:]

    def _along(
        self, size: int, kernel: int, stride: int, dilation: int, head: int, tail: int
    ) -> tuple[int, int, int]:
        """Return the padding before and after, and the number of windows, of one dimension."""
        reach = dilation * (kernel - 1) + 1
        if self.legacy == SAME:
            output = -(-size // stride)
            needed = (output - 1) * stride + reach - size
            head = int(needed / 2)
            return head, needed - head, output
        output = (size + head + tail - reach) // stride + 1
        if self.legacy == CAFFE:
            output = -(-(size + 2 * head - reach) // stride) + 1
            if head > 0 and (output - 1) * stride >= size + head:
                output -= 1
            tail = (output - 1) * stride + reach - size - head
        if output < 1:
            dilated = "" if dilation == 1 else f" with its dilation, {reach},"
            raise ValueError(
                f"the kernel {kernel}{dilated} is larger than the image with its padding, "
                f"{size + head + tail}"
            )
        return head, tail, output


def spread(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return sizes for a number of dimensions: a single size holds for all."""
    if len(sizes) == 1:
        return sizes * count
    if len(sizes) != count:
        raise ValueError(f"{len(sizes)} sizes are given for images of {count} dimensions")
    return sizes


def channels_second(x: Tensor) -> Tensor:
    """Return a view of NHWC images in the order NCHW."""
    return x.movedim(-1, 1)


def channels_last(x: Tensor) -> Tensor:
    """Return a view of NCHW images in the order NHWC."""
    return x.movedim(1, -1)


def in_nchw(order: str, *images: Tensor) -> list[Tensor]:
    """Return views of images of an order in the order NCHW."""
    return [channels_second(x) if order == "NHWC" else x for x in images]


def in_order(order: str, y: Tensor) -> Tensor:
    """Return a view of NCHW images in an order."""
    return channels_last(y) if order == "NHWC" else y


class Windowed:
    """An operator over windows of images, which computes in the order NCHW."""

    def __init__(self, *, context: Context) -> None:
        self.windows = Windows(context.definition)

    def images(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors, such as images and filters, with the channels in the second place."""
        return [channels_second(x) if self.windows.last else x for x in tensors]

    def ordered(self, y: Tensor) -> Tensor:
        """Return a result in the order of the operator."""
        return channels_last(y) if self.windows.last else y
