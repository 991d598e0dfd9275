"""Writes ShuffleNet 1x of 3 groups: `python -m prototxt.shufflenet.generate`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.imagenet import Recipe, write


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


def unit(n: NetSpec, bottom: Any, name: str, kind: str, *, active: bool, **how: Any) -> Any:
    """Add a convolution, its BatchNorm and Scale, and its ReLU if active."""
    n[name] = getattr(L, kind)(
        bottom,
        convolution_param={"bias_term": False, "weight_filler": {"type": "msra"}, **how},
    )
    n[f"{name}_bn"] = L.BatchNorm(n[name], in_place=True)
    n[f"{name}_scale"] = L.Scale(n[f"{name}_bn"], in_place=True, bias_term=True)
    if not active:
        return n[f"{name}_scale"]
    n[f"{name}_relu"] = L.ReLU(n[f"{name}_scale"], in_place=True)
    return n[f"{name}_relu"]


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
    path = unit(
        n,
        top,
        f"{name}_conv1",
        "Convolution",
        active=True,
        num_output=inner,
        kernel_size=1,
        group=groups if grouped else 1,
    )
    n[f"{name}_shuffle"] = L.ShuffleChannel(path, group=groups)
    path = unit(
        n,
        n[f"{name}_shuffle"],
        f"{name}_conv2",
        "DepthwiseConvolution",
        active=False,
        num_output=inner,
        kernel_size=3,
        pad=1,
        stride=2 if first else 1,
        group=inner,
    )
    path = unit(
        n,
        path,
        f"{name}_conv3",
        "Convolution",
        active=False,
        num_output=outputs,
        kernel_size=1,
        group=groups,
    )
    if first:
        n[f"{name}_match"] = L.Pooling(top, pool=P.Pooling.AVE, kernel_size=3, stride=2)
        n[name] = L.Concat(n[f"{name}_match"], path)
    else:
        n[name] = L.Eltwise(top, path)
    n[f"{name}_relu"] = L.ReLU(n[name], in_place=True)
    return n[f"{name}_relu"]


def body(size: Size, n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc1000`."""
    top = unit(
        n,
        n.data,
        "conv1",
        "Convolution",
        active=True,
        num_output=size.stem,
        kernel_size=3,
        pad=1,
        stride=2,
    )
    n.pool1 = L.Pooling(top, pool=P.Pooling.MAX, kernel_size=3, stride=2)
    top, before, number = n.pool1, size.stem, 0
    for stage, (width, blocks) in enumerate(zip(size.widths, size.blocks, strict=True)):
        for index in range(blocks):
            number += 1
            # The stem has too few channels for groups.
            grouped = stage > 0 or index > 0
            top = block(
                n,
                top,
                f"resx{number}",
                before,
                width,
                size.groups,
                first=index == 0,
                grouped=grouped,
            )
            before = width
    n.pool_ave = L.Pooling(top, pool=P.Pooling.AVE, global_pooling=True)
    n.fc1000 = L.InnerProduct(
        n.pool_ave,
        num_output=size.classes,
        weight_filler={"type": "xavier"},
        param=[{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}],
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
