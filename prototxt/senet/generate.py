"""Writes SE-ResNet-50: `python -m prototxt.senet.generate`.

Layers are named as in the model that the authors released.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.imagenet import Recipe
from prototxt.parts import (
    TWICE,
    XAVIER,
    convolution,
    max_pool,
    mean_pool,
    normalized,
    put,
    relu,
    write,
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a net.

    Attributes:
        classes: of images.
        widths: of the 3x3 convolutions of stages 2 to 5.
        blocks: of these stages.
        reduction: channels / channels of a squeeze.
    """

    classes: int = 1000
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    reduction: int = 16


def unit(
    n: NetSpec,
    top: Any,
    name: str,
    outputs: int,
    kernel: int,
    stride: int = 1,
    *,
    active: bool = True,
) -> Any:
    """Add a convolution, its BatchNorm and Scale, and its ReLU if active."""
    how = {"stride": stride, "pad": kernel // 2, "bias_term": False}
    top = convolution(n, top, name, outputs, kernel, **how)
    last = f"{name}/relu" if active else ""
    return normalized(n, top, f"{name}/bn", f"{name}/bn/scale", last)


def squeeze(n: NetSpec, top: Any, name: str, width: int, reduction: int) -> Any:
    """Add the factors of the channels from their means."""
    top = mean_pool(n, top, f"{name}_global_pool")
    top = convolution(n, top, f"{name}_1x1_down", max(width // reduction, 1), 1)
    top = relu(n, top, f"{name}_1x1_down/relu")
    top = convolution(n, top, f"{name}_1x1_up", width, 1)
    return put(n, f"{name}_prob", L.Sigmoid(top, in_place=True))


def block(
    n: NetSpec, top: Any, name: str, width: int, stride: int, first: bool, reduction: int
) -> Any:
    """Add a bottleneck whose channels are multiplied by factors before they are added."""
    shortcut = top
    if first:
        shortcut = unit(n, top, f"{name}_1x1_proj", 4 * width, 1, stride, active=False)
    inner = unit(n, top, f"{name}_1x1_reduce", width, 1, stride)
    inner = unit(n, inner, f"{name}_3x3", width, 3)
    inner = unit(n, inner, f"{name}_1x1_increase", 4 * width, 1, active=False)
    weighed = L.Axpy(squeeze(n, inner, name, 4 * width, reduction), inner, shortcut)
    return relu(n, put(n, name, weighed), f"{name}/relu")


def body(size: Size, n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `classifier`."""
    top = max_pool(n, unit(n, n.data, "conv1/7x7_s2", size.widths[0], 7, 2), "pool1/3x3_s2")
    for stage, (width, blocks) in enumerate(zip(size.widths, size.blocks, strict=True), 2):
        for index in range(blocks):
            stride = 2 if stage > 2 and index == 0 else 1
            name, first = f"conv{stage}_{index + 1}", index == 0
            top = block(n, top, name, width, stride, first, size.reduction)
    top = mean_pool(n, top, "pool5/7x7_s1")
    n.classifier = L.InnerProduct(top, num_output=size.classes, weight_filler=XAVIER, param=TWICE)
    return n.classifier


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="SE-ResNet-50",
        folder="senet",
        about="SE-ResNet-50 on ImageNet: each bottleneck weighs its channels by their means.",
        paper='Hu, Shen, Sun, "Squeeze-and-excitation networks" (2017).',
        expect="about 0.776 top-1 and 0.939 top-5 on the validation pictures, as the authors' "
        "model (one crop).",
        body=partial(body, Size()),
        solver={
            "base_lr": 0.1,
            "lr_policy": "step",
            "gamma": 0.1,
            "stepsize": 150000,
            "max_iter": 500000,
            "momentum": 0.9,
            "weight_decay": 0.0001,
        },
    ).definitions()


if __name__ == "__main__":
    write("senet", definitions())
