"""Writes PSPNet-50: `python -m prototxt.pspnet.generate`.

Layers are named as in the models that the authors released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt import backbones
from prototxt.parts import (
    MSRA,
    constant,
    convolution,
    dropout,
    max_pool,
    mean_pool,
    put,
    relu,
    write,
)

MEAN = (103.939, 116.779, 123.68)
NAME = "pspnet50"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a net.

    Attributes:
        classes: of pixels.
        widths: of the 3x3 convolutions of stages 2 to 5.
        blocks: of these stages.
        pool: channels of each level of the pyramid, and of the last convolution.
        levels: regions a side in each level of the pyramid.
        crop: side of the input, 8 k + 1.
        batch: images of one worker.
        momentum: of the running statistics.
        ignored: the label of pixels that are left out.
        source: the list for training; and for tests.
    """

    classes: int = 150
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    pool: int = 512
    levels: tuple[int, ...] = (1, 2, 3, 6)
    crop: int = 473
    batch: int = 4
    momentum: float = 0.95
    ignored: int = 255
    source: str = "data/ade20k_train.txt"
    test_source: str = "data/ade20k_val.txt"


def unit(
    n: NetSpec,
    top: Any,
    name: str,
    outputs: int,
    kernel: int,
    momentum: float,
    *,
    active: bool = True,
    **how: Any,
) -> Any:
    """Add a convolution, its BN, and its ReLU if active."""
    how = {"dilation": 1, **how}
    pad = how["dilation"] * (kernel // 2)
    top = convolution(n, top, name, outputs, kernel, pad=pad, bias_term=False, **how)
    norm = L.BN(
        top,
        in_place=True,
        slope_filler=constant(1),
        bias_filler=constant(0),
        momentum=momentum,
        param=[{"lr_mult": 1, "decay_mult": 0}, {"lr_mult": 1, "decay_mult": 0}],
    )
    top = put(n, f"{name}/bn", norm)
    return relu(n, top, f"{name}/relu") if active else top


def block(
    n: NetSpec, top: Any, name: str, width: int, stride: int, dilation: int, first: bool, m: float
) -> Any:
    """Add a bottleneck."""
    shortcut = top
    if first:
        shortcut = unit(n, top, f"{name}_1x1_proj", 4 * width, 1, m, active=False, stride=stride)
    inner = unit(n, top, f"{name}_1x1_reduce", width, 1, m, stride=stride)
    inner = unit(n, inner, f"{name}_3x3", width, 3, m, dilation=dilation)
    inner = unit(n, inner, f"{name}_1x1_increase", 4 * width, 1, m, active=False)
    return relu(n, put(n, name, L.Eltwise(shortcut, inner)), f"{name}/relu")


def body(n: NetSpec, size: Size) -> Any:
    """From `data` to the scores at an eighth of the extents."""
    m, stem = size.momentum, size.widths[0]
    top = unit(n, n.data, "conv1_1_3x3_s2", stem, 3, m, stride=2)
    top = unit(n, top, "conv1_2_3x3", stem, 3, m)
    top = unit(n, top, "conv1_3_3x3", 2 * stem, 3, m)
    top = max_pool(n, top, "pool1_3x3_s2", pad=1, ceil_mode=False)
    for stage, (width, blocks) in enumerate(zip(size.widths, size.blocks, strict=True), 2):
        stride, dilation = (1, 1) if stage == 2 else (2, 1) if stage == 3 else (1, 2 ** (stage - 3))
        for index in range(blocks):
            first = index == 0
            name, step = f"conv{stage}_{index + 1}", stride if first else 1
            top = block(n, top, name, width, step, dilation, first, m)
    return pyramid(n, top, size)


def pyramid(n: NetSpec, top: Any, size: Size) -> Any:
    """Add the means over regions, resized and concatenated, and the scores."""
    side = (size.crop - 1) // 8 + 1
    levels = [top]
    for level in size.levels:
        kernel = -(-side // level)
        stride = kernel if kernel * level <= side else side // level
        name = f"conv5_3_pool{level}"
        pooled = mean_pool(n, top, name, kernel_size=kernel, stride=stride)
        reduced = unit(n, pooled, f"{name}_conv", size.pool, 1, size.momentum)
        resized = L.Interp(reduced, interp_param={"height": side, "width": side})
        levels.append(put(n, f"{name}_interp", resized))
    n.conv5_3_concat = L.Concat(*levels)
    top = unit(n, n.conv5_3_concat, "conv5_4", size.pool, 3, size.momentum)
    n.conv6 = L.Convolution(
        dropout(n, top, "conv5_4_drop", 0.1),
        num_output=size.classes,
        kernel_size=1,
        param=[{"lr_mult": 10, "decay_mult": 1}, {"lr_mult": 20, "decay_mult": 1}],
        weight_filler=MSRA,
    )
    n.conv6_interp = L.Interp(n.conv6, interp_param={"height": size.crop, "width": size.crop})
    return n.conv6_interp


def train(size: Size = Size()) -> NetParameter:
    """Return the net for training and tests."""
    return backbones.segmented(
        NAME,
        (size.source, size.test_source),
        size.batch,
        lambda n: body(n, size),
        loss={},
        ignored=size.ignored,
        transform={"mean_value": list(MEAN), "crop_size": size.crop},
    )


def deploy(size: Size = Size()) -> NetParameter:
    """Return the net for use."""
    return backbones.scored(NAME, (size.crop, size.crop), lambda n: body(n, size))


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return backbones.definitions(
        "pspnet",
        about="PSPNet-50 on ADE20K: a dilated ResNet-50 and means over a pyramid of regions.",
        paper='Zhao, Shi, Qi, Wang, Jia, "Pyramid scene parsing network" (2017).',
        expect="0.417 mean IoU on ADE20K's validation set, as the paper.",
        train=train(),
        deploy=deploy(),
        solver={
            "net": "train_val.prototxt",
            "test_iter": 2000,
            "test_interval": 10000,
            "base_lr": 0.01,
            "lr_policy": "poly",
            "power": 0.9,
            "display": 20,
            "momentum": 0.9,
            "max_iter": 150000,
            "weight_decay": 0.0001,
            "snapshot": 10000,
            "snapshot_prefix": "pspnet50",
        },
    )


if __name__ == "__main__":
    write("pspnet", definitions())
