"""Writes CaffeNet: `python -m prototxt.caffenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.imagenet import TWICE, Recipe, write


def convolution(
    n: NetSpec, bottom: Any, number: int, outputs: int, kernel: int, bias: int, **how: int
) -> Any:
    name = f"conv{number}"
    n[name] = L.Convolution(
        bottom,
        num_output=outputs,
        kernel_size=kernel,
        param=TWICE,
        weight_filler={"type": "gaussian", "std": 0.01},
        bias_filler={"type": "constant", "value": bias},
        **how,
    )
    n[f"relu{number}"] = L.ReLU(n[name], in_place=True)
    return n[f"relu{number}"]


def pooled(n: NetSpec, bottom: Any, number: int, *, norm: bool) -> Any:
    """Pooling, then normalization: the order in which CaffeNet differs from AlexNet."""
    n[f"pool{number}"] = L.Pooling(bottom, pool=P.Pooling.MAX, kernel_size=3, stride=2)
    if not norm:
        return n[f"pool{number}"]
    n[f"norm{number}"] = L.LRN(n[f"pool{number}"], local_size=5, alpha=1e-4, beta=0.75)
    return n[f"norm{number}"]


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc8`."""
    top = pooled(n, convolution(n, n.data, 1, 96, 11, 0, stride=4), 1, norm=True)
    top = pooled(n, convolution(n, top, 2, 256, 5, 1, pad=2, group=2), 2, norm=True)
    top = convolution(n, top, 3, 384, 3, 0, pad=1)
    top = convolution(n, top, 4, 384, 3, 1, pad=1, group=2)
    top = pooled(n, convolution(n, top, 5, 256, 3, 1, pad=1, group=2), 5, norm=False)
    for number in (6, 7):
        n[f"fc{number}"] = L.InnerProduct(
            top,
            num_output=4096,
            param=TWICE,
            weight_filler={"type": "gaussian", "std": 0.005},
            bias_filler={"type": "constant", "value": 1},
        )
        n[f"relu{number}"] = L.ReLU(n[f"fc{number}"], in_place=True)
        n[f"drop{number}"] = L.Dropout(n[f"relu{number}"], dropout_ratio=0.5, in_place=True)
        top = n[f"drop{number}"]
    n.fc8 = L.InnerProduct(
        top,
        num_output=1000,
        param=TWICE,
        weight_filler={"type": "gaussian", "std": 0.01},
        bias_filler={"type": "constant"},
    )
    return n.fc8


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
