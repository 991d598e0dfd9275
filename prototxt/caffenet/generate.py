"""Writes CaffeNet: `python -m prototxt.caffenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt import parts
from prototxt.imagenet import Recipe
from prototxt.parts import TWICE, constant, dropout, gaussian, max_pool, put, relu, write


def convolution(
    n: NetSpec, bottom: Any, number: int, outputs: int, kernel: int, bias: int, **how: Any
) -> Any:
    """Add a convolution and its ReLU."""
    fillers = {"weight_filler": gaussian(0.01), "bias_filler": constant(bias)}
    how |= {"param": TWICE, **fillers}
    top = parts.convolution(n, bottom, f"conv{number}", outputs, kernel, **how)
    return relu(n, top, f"relu{number}")


def pooled(n: NetSpec, bottom: Any, number: int) -> Any:
    """Pooling, then normalization: the order in which CaffeNet differs from AlexNet."""
    top = max_pool(n, bottom, f"pool{number}")
    return put(n, f"norm{number}", L.LRN(top, local_size=5, alpha=1e-4, beta=0.75))


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc8`."""
    top = pooled(n, convolution(n, n.data, 1, 96, 11, 0, stride=4), 1)
    top = pooled(n, convolution(n, top, 2, 256, 5, 1, pad=2, group=2), 2)
    top = convolution(n, top, 3, 384, 3, 0, pad=1)
    top = convolution(n, top, 4, 384, 3, 1, pad=1, group=2)
    top = max_pool(n, convolution(n, top, 5, 256, 3, 1, pad=1, group=2), "pool5")
    for number, outputs, std, bias in (
        (6, 4096, 0.005, constant(1)),
        (7, 4096, 0.005, constant(1)),
        (8, 1000, 0.01, {"type": "constant"}),
    ):
        fillers = {"weight_filler": gaussian(std), "bias_filler": bias}
        full = L.InnerProduct(top, num_output=outputs, param=TWICE, **fillers)
        top = put(n, f"fc{number}", full)
        if number < 8:
            top = dropout(n, relu(n, top, f"relu{number}"), f"drop{number}", 0.5)
    return top


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="CaffeNet",
        folder="caffenet",
        about="CaffeNet on ImageNet: AlexNet with pooling before normalization; 60,965,224 "
        "parameters.",
        paper="Krizhevsky, Sutskever, Hinton (2012), as in Caffe's bvlc_reference_caffenet (Jia "
        "et al., 2014).",
        expect="about 0.574 top-1 and 0.804 top-5 on the validation pictures, as Caffe's model.",
        body=body,
        crop=227,
        batch=128,
        solver={
            "base_lr": 0.01,
            "lr_policy": "step",
            "gamma": 0.1,
            "stepsize": 100000,
            "max_iter": 450000,
            "momentum": 0.9,
            "weight_decay": 0.0005,
        },
    ).definitions()


if __name__ == "__main__":
    write("caffenet", definitions())
