"""Writes SqueezeNet 1.1: `python -m prototxt.squeezenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.imagenet import Recipe, write

# Outputs of squeeze1x1 and of each expand, from fire2 to fire9.
FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
POOLED_AFTER = {3: "pool3", 5: "pool5"}


def convolution(
    n: NetSpec, bottom: Any, name: str, relu: str, outputs: int, kernel: int, **how: Any
) -> Any:
    how.setdefault("weight_filler", {"type": "xavier"})
    n[name] = L.Convolution(bottom, num_output=outputs, kernel_size=kernel, **how)
    n[relu] = L.ReLU(n[name], in_place=True)
    return n[relu]


def pooled(n: NetSpec, bottom: Any, name: str) -> Any:
    n[name] = L.Pooling(bottom, pool=P.Pooling.MAX, kernel_size=3, stride=2)
    return n[name]


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `pool10`."""
    top = pooled(n, convolution(n, n.data, "conv1", "relu_conv1", 64, 3, stride=2), "pool1")
    for number, (squeeze, expand) in enumerate(FIRES, 2):
        at = f"fire{number}"
        small = convolution(n, top, f"{at}/squeeze1x1", f"{at}/relu_squeeze1x1", squeeze, 1)
        one = convolution(n, small, f"{at}/expand1x1", f"{at}/relu_expand1x1", expand, 1)
        three = convolution(n, small, f"{at}/expand3x3", f"{at}/relu_expand3x3", expand, 3, pad=1)
        n[f"{at}/concat"] = L.Concat(one, three)
        top = n[f"{at}/concat"]
        if number in POOLED_AFTER:
            top = pooled(n, top, POOLED_AFTER[number])
    n.drop9 = L.Dropout(top, dropout_ratio=0.5, in_place=True)
    last = convolution(
        n,
        n.drop9,
        "conv10",
        "relu_conv10",
        1000,
        1,
        weight_filler={"type": "gaussian", "std": 0.01},
    )
    n.pool10 = L.Pooling(last, pool=P.Pooling.AVE, global_pooling=True)
    return n.pool10


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="SqueezeNet_v1.1",
        folder="squeezenet",
        about="SqueezeNet 1.1 on ImageNet: AlexNet's accuracy with a fiftieth of its parameters; "
        "1,235,496 of them.",
        paper='Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters" '
        "(2016).",
        expect="about 0.575 top-1 and 0.803 top-5 on the validation pictures, as the authors' "
        "model.",
        body=body,
        crop=227,
        solver={
            "base_lr": 0.04,
            "lr_policy": "poly",
            "power": 1.0,
            "max_iter": 170000,
            "momentum": 0.9,
            "weight_decay": 0.0002,
        },
    ).definitions()


if __name__ == "__main__":
    write("squeezenet", definitions())
