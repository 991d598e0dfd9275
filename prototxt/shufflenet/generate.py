"""Writes ShuffleNet 1x of 3 groups: `python -m prototxt.shufflenet.generate`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.imagenet import Recipe
from prototxt.parts import MSRA, TWICE, XAVIER, max_pool, mean_pool, normalized, put, relu, write


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a net.

    Attributes:
        classes: of images.
        stem: channels of the first convolution.
        widths: channels of stages 2 to 4.
        blocks: of these stages.
        groups: of the 1x1 convolutions.
    """

    classes: int = 1000
    stem: int = 24
    widths: tuple[int, ...] = (240, 480, 960)
    blocks: tuple[int, ...] = (4, 8, 4)
    groups: int = 3


def unit(
    n: NetSpec, bottom: Any, name: str, *, active: bool, deep: bool = False, **how: Any
) -> Any:
    """Add a convolution, of each channel alone if `deep`, its BatchNorm and Scale, and its ReLU
    if active.
    """
    layer = L.DepthwiseConvolution if deep else L.Convolution
    param = {"bias_term": False, "weight_filler": MSRA, **how}
    top = put(n, name, layer(bottom, convolution_param=param))
    return normalized(n, top, f"{name}_bn", f"{name}_scale", f"{name}_relu" if active else "")


def block(
    n: NetSpec,
    top: Any,
    name: str,
    before: int,
    width: int,
    groups: int,
    *,
    first: bool,
    grouped: bool,
) -> Any:
    """Add a unit of ShuffleNet; the first of a stage halves the extents and concatenates the
    mean of what it reads.
    """
    inner = width // 4
    outputs = width - before if first else width
    how = {"num_output": inner, "kernel_size": 1, "group": groups if grouped else 1}
    path = unit(n, top, f"{name}_conv1", active=True, **how)
    path = put(n, f"{name}_shuffle", L.ShuffleChannel(path, group=groups))
    how = {"num_output": inner, "kernel_size": 3, "pad": 1, "group": inner}
    path = unit(n, path, f"{name}_conv2", active=False, deep=True, stride=2 if first else 1, **how)
    how = {"num_output": outputs, "kernel_size": 1, "group": groups}
    path = unit(n, path, f"{name}_conv3", active=False, **how)
    if first:
        match = mean_pool(n, top, f"{name}_match", kernel_size=3, stride=2)
        path = put(n, name, L.Concat(match, path))
    else:
        path = put(n, name, L.Eltwise(top, path))
    return relu(n, path, f"{name}_relu")


def body(size: Size, n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc1000`."""
    how = {"num_output": size.stem, "kernel_size": 3, "pad": 1, "stride": 2}
    top = max_pool(n, unit(n, n.data, "conv1", active=True, **how), "pool1")
    before, number = size.stem, 0
    for stage, (width, blocks) in enumerate(zip(size.widths, size.blocks, strict=True)):
        for index in range(blocks):
            number += 1
            # The stem has too few channels for groups.
            grouped, name = stage > 0 or index > 0, f"resx{number}"
            sizes = before, width, size.groups
            top = block(n, top, name, *sizes, first=index == 0, grouped=grouped)
            before = width
    n.fc1000 = L.InnerProduct(
        mean_pool(n, top, "pool_ave"), num_output=size.classes, weight_filler=XAVIER, param=TWICE
    )
    return n.fc1000


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="ShuffleNet",
        folder="shufflenet",
        about="ShuffleNet 1x on ImageNet: grouped 1x1 convolutions whose channels are interleaved.",
        paper='Zhang, Zhou, Lin, Sun, "ShuffleNet: an extremely efficient convolutional neural '
        'network" (2017).',
        expect="about 0.674 top-1 on the validation pictures, as the paper (one crop).",
        body=partial(body, Size()),
        scale=0.017,
        mean=(103.94, 116.78, 123.68),
        solver={
            "base_lr": 0.1,
            "lr_policy": "poly",
            "power": 1.0,
            "max_iter": 300000,
            "momentum": 0.9,
            "weight_decay": 0.00004,
        },
    ).definitions()


if __name__ == "__main__":
    write("shufflenet", definitions())
