"""Writes DenseNet-121: `python -m prototxt.densenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.imagenet import Recipe
from prototxt.parts import convolution, max_pool, mean_pool, normalized, put, write

BLOCKS = (6, 12, 24, 16)
GROWTH = 32


def active(n: NetSpec, bottom: Any, name: str, relu: str, *, in_place: bool = False) -> Any:
    """Add normalization, scale and ReLU.

    The bottom of a dense layer has other readers, and stays as it is.
    """
    how = {"eps": 1e-5, "in_place": in_place}
    return normalized(n, bottom, f"{name}/bn", f"{name}/scale", relu, **how)


def dense_layer(n: NetSpec, bottom: Any, stage: int, place: int) -> Any:
    """Add a layer of GROWTH maps; return the maps so far with them."""
    at = f"conv{stage}_{place}"
    top = active(n, bottom, f"{at}/x1", f"relu{stage}_{place}/x1")
    top = convolution(n, top, f"{at}/x1", 4 * GROWTH, 1, bias_term=False)
    top = active(n, top, f"{at}/x2", f"relu{stage}_{place}/x2", in_place=True)
    top = convolution(n, top, f"{at}/x2", GROWTH, 3, pad=1, bias_term=False)
    return put(n, f"concat_{stage}_{place}", L.Concat(bottom, top))


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc6`."""
    channels = 2 * GROWTH
    top = convolution(n, n.data, "conv1", channels, 7, stride=2, pad=3, bias_term=False)
    top = max_pool(n, active(n, top, "conv1", "relu1", in_place=True), "pool1", pad=1)
    for stage, layers in enumerate(BLOCKS, 2):
        for place in range(1, layers + 1):
            top = dense_layer(n, top, stage, place)
        channels += layers * GROWTH
        if stage <= len(BLOCKS):
            channels //= 2
            top = active(n, top, f"conv{stage}_blk", f"relu{stage}_blk")
            top = convolution(n, top, f"conv{stage}_blk", channels, 1, bias_term=False)
            top = mean_pool(n, top, f"pool{stage}", kernel_size=2, stride=2)
    top = active(n, top, "conv5_blk", "relu5_blk")
    return convolution(n, mean_pool(n, top, "pool5"), "fc6", 1000, 1)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="DENSENET_121",
        folder="densenet",
        about="DenseNet-121 on ImageNet: each layer reads all maps before it in its block; "
        "7,978,856 parameters learn.",
        paper='Huang, Liu, van der Maaten, Weinberger, "Densely connected convolutional networks" '
        "(2016).",
        expect="about 0.750 top-1 and 0.923 top-5 on the validation pictures, as published (one "
        "crop).",
        body=body,
        mean=(103.94, 116.78, 123.68),
        scale=0.017,
        solver={
            "base_lr": 0.1,
            "lr_policy": "step",
            "gamma": 0.1,
            "stepsize": 150000,
            "max_iter": 450000,
            "momentum": 0.9,
            "weight_decay": 0.0001,
        },
    ).definitions()


if __name__ == "__main__":
    write("densenet", definitions())
