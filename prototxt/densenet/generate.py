"""Writes DenseNet-121: `python -m prototxt.densenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.imagenet import Recipe, write

BLOCKS = (6, 12, 24, 16)
GROWTH = 32


def normalized(n: NetSpec, bottom: Any, name: str, relu: str, *, in_place: bool = False) -> Any:
    """Add normalization, scale and ReLU.

    The bottom of a dense layer has other readers, and stays as it is.
    """
    n[f"{name}/bn"] = L.BatchNorm(bottom, eps=1e-5, in_place=in_place)
    n[f"{name}/scale"] = L.Scale(n[f"{name}/bn"], in_place=True, bias_term=True)
    n[relu] = L.ReLU(n[f"{name}/scale"], in_place=True)
    return n[relu]


def convolution(n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, **how: int) -> Any:
    n[name] = L.Convolution(
        bottom,
        num_output=outputs,
        kernel_size=kernel,
        bias_term=False,
        weight_filler={"type": "msra"},
        **how,
    )
    return n[name]


def dense_layer(n: NetSpec, bottom: Any, stage: int, place: int) -> Any:
    """Add a layer of GROWTH maps; return the maps so far with them."""
    at = f"conv{stage}_{place}"
    small = convolution(
        n, normalized(n, bottom, f"{at}/x1", f"relu{stage}_{place}/x1"), f"{at}/x1", 4 * GROWTH, 1
    )
    more = normalized(n, small, f"{at}/x2", f"relu{stage}_{place}/x2", in_place=True)
    more = convolution(n, more, f"{at}/x2", GROWTH, 3, pad=1)
    n[f"concat_{stage}_{place}"] = L.Concat(bottom, more)
    return n[f"concat_{stage}_{place}"]


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc6`."""
    channels = 2 * GROWTH
    top = convolution(n, n.data, "conv1", channels, 7, stride=2, pad=3)
    n.pool1 = L.Pooling(
        normalized(n, top, "conv1", "relu1", in_place=True),
        pool=P.Pooling.MAX,
        kernel_size=3,
        stride=2,
        pad=1,
    )
    top = n.pool1
    for stage, layers in enumerate(BLOCKS, 2):
        for place in range(1, layers + 1):
            top = dense_layer(n, top, stage, place)
        channels += layers * GROWTH
        if stage <= len(BLOCKS):
            channels //= 2
            top = normalized(n, top, f"conv{stage}_blk", f"relu{stage}_blk")
            top = convolution(n, top, f"conv{stage}_blk", channels, 1)
            n[f"pool{stage}"] = L.Pooling(top, pool=P.Pooling.AVE, kernel_size=2, stride=2)
            top = n[f"pool{stage}"]
    top = normalized(n, top, "conv5_blk", "relu5_blk")
    n.pool5 = L.Pooling(top, pool=P.Pooling.AVE, global_pooling=True)
    n.fc6 = L.Convolution(n.pool5, num_output=1000, kernel_size=1, weight_filler={"type": "msra"})
    return n.fc6


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
