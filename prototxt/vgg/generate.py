"""Writes VGG-16 and VGG-19: `python -m prototxt.vgg.generate`."""

from __future__ import annotations

from functools import partial
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.imagenet import Recipe
from prototxt.parts import TWICE, convolution, dropout, gaussian, max_pool, put, relu, write

# Convolutions of each of the five stages.
STAGES = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
PARAMETERS = {16: "138,357,544", 19: "143,667,240"}
ERROR = {16: "0.715 top-1 and 0.898 top-5", 19: "0.713 top-1 and 0.899 top-5"}


def body(depth: int, n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc8`."""
    top = n.data
    for stage, count in enumerate(STAGES[depth], 1):
        for place in range(1, count + 1):
            name = f"{stage}_{place}"
            width, bias = min(32 << stage, 512), {"type": "constant"}
            how = {"pad": 1, "param": TWICE, "bias_filler": bias}
            top = convolution(n, top, f"conv{name}", width, 3, **how)
            top = relu(n, top, f"relu{name}")
        top = max_pool(n, top, f"pool{stage}", kernel=2)
    how = {"param": TWICE, "weight_filler": gaussian(0.01)}
    for number in (6, 7):
        top = put(n, f"fc{number}", L.InnerProduct(top, num_output=4096, **how))
        top = dropout(n, relu(n, top, f"relu{number}"), f"drop{number}", 0.5)
    return put(n, "fc8", L.InnerProduct(top, num_output=1000, **how))


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    files: dict[str, str] = {}
    for depth in STAGES:
        files |= Recipe(
            name=f"VGG_ILSVRC_{depth}_layers",
            folder="vgg",
            stem=f"vgg{depth}",
            about=f"VGG-{depth} on ImageNet: {depth} layers of 3x3 convolutions and 3 fully "
            f"connected; {PARAMETERS[depth]} parameters.",
            paper='Simonyan, Zisserman, "Very deep convolutional networks for large-scale image '
            'recognition" (2014).',
            expect=f"about {ERROR[depth]} on the validation pictures, as the authors' model (one "
            "crop).",
            body=partial(body, depth),
            mean=(103.939, 116.779, 123.68),
            solver={
                "base_lr": 0.01,
                "lr_policy": "step",
                "gamma": 0.1,
                "stepsize": 100000,
                "max_iter": 370000,
                "momentum": 0.9,
                "weight_decay": 0.0005,
            },
        ).definitions()
    return files


if __name__ == "__main__":
    write("vgg", definitions())
