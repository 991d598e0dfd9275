"""Writes SqueezeNet 1.1: `python -m prototxt.squeezenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt import parts
from prototxt.imagenet import Recipe
from prototxt.parts import XAVIER, dropout, gaussian, max_pool, mean_pool, put, relu, write

# Outputs of squeeze1x1 and of each expand, from fire2 to fire9.
FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
POOLED_AFTER = {3: "pool3", 5: "pool5"}


def convolution(
    n: NetSpec, bottom: Any, name: str, active: str, outputs: int, kernel: int, **how: Any
) -> Any:
    """Add a convolution and its ReLU."""
    how = {"weight_filler": XAVIER, **how}
    return relu(n, parts.convolution(n, bottom, name, outputs, kernel, **how), active)


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `pool10`."""
    top = max_pool(n, convolution(n, n.data, "conv1", "relu_conv1", 64, 3, stride=2), "pool1")
    for number, (squeeze, expand) in enumerate(FIRES, 2):
        at = f"fire{number}"
        small = convolution(n, top, f"{at}/squeeze1x1", f"{at}/relu_squeeze1x1", squeeze, 1)
        one = convolution(n, small, f"{at}/expand1x1", f"{at}/relu_expand1x1", expand, 1)
        three = convolution(n, small, f"{at}/expand3x3", f"{at}/relu_expand3x3", expand, 3, pad=1)
        top = put(n, f"{at}/concat", L.Concat(one, three))
        if number in POOLED_AFTER:
            top = max_pool(n, top, POOLED_AFTER[number])
    top = dropout(n, top, "drop9", 0.5)
    filler = gaussian(0.01)
    top = convolution(n, top, "conv10", "relu_conv10", 1000, 1, weight_filler=filler)
    return mean_pool(n, top, "pool10")


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
