"""Writes MobileNet v1: `python -m prototxt.mobilenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from prototxt.imagenet import Recipe
from prototxt.parts import convolution, mean_pool, normalized, write

# Name, stride and outputs of each pair of a depthwise and a 1x1 convolution.
PAIRS = (
    ("2_1", 1, 64),
    ("2_2", 2, 128),
    ("3_1", 1, 128),
    ("3_2", 2, 256),
    ("4_1", 1, 256),
    ("4_2", 2, 512),
    ("5_1", 1, 512),
    ("5_2", 1, 512),
    ("5_3", 1, 512),
    ("5_4", 1, 512),
    ("5_5", 1, 512),
    ("5_6", 2, 1024),
    ("6", 1, 1024),
)


def unit(n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, **how: int) -> Any:
    """Add a convolution without bias, its normalization, scale and ReLU."""
    how |= {"pad": kernel // 2, "bias_term": False}
    top = convolution(n, bottom, name, outputs, kernel, **how)
    return normalized(n, top, f"{name}/bn", f"{name}/scale", f"relu{name.removeprefix('conv')}")


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc7`."""
    top, channels = unit(n, n.data, "conv1", 32, 3, stride=2), 32
    for name, stride, outputs in PAIRS:
        top = unit(n, top, f"conv{name}/dw", channels, 3, stride=stride, group=channels)
        top = unit(n, top, f"conv{name}/sep", outputs, 1)
        channels = outputs
    return convolution(n, mean_pool(n, top, "pool6"), "fc7", 1000, 1)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="MOBILENET",
        folder="mobilenet",
        about="MobileNet v1 on ImageNet: each 3x3 convolution on its channel alone, then 1x1; "
        "4,231,976 parameters learn.",
        paper='Howard et al., "MobileNets: efficient convolutional neural networks for mobile '
        'vision applications" (2017).',
        expect="about 0.706 top-1 on the validation pictures, as published.",
        body=body,
        mean=(103.94, 116.78, 123.68),
        scale=0.017,
        solver={
            "base_lr": 0.1,
            "lr_policy": "poly",
            "power": 1.0,
            "max_iter": 500000,
            "momentum": 0.9,
            "weight_decay": 0.0001,
        },
    ).definitions()


if __name__ == "__main__":
    write("mobilenet", definitions())
