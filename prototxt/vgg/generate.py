"""Writes VGG-16 and VGG-19: `python -m prototxt.vgg.generate`."""

from __future__ import annotations

from functools import partial
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.imagenet import TWICE, Recipe, write

# Convolutions of each of the five stages.
STAGES = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
PARAMETERS = {16: "138,357,544", 19: "143,667,240"}
ERROR = {16: "0.715 top-1 and 0.898 top-5", 19: "0.713 top-1 and 0.899 top-5"}
FILLERS = {"weight_filler": {"type": "msra"}, "bias_filler": {"type": "constant"}}


def body(depth: int, n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc8`."""
    top = n.data
    for stage, count in enumerate(STAGES[depth], 1):
        for place in range(1, count + 1):
            name = f"{stage}_{place}"
            n[f"conv{name}"] = L.Convolution(
                top, num_output=min(32 << stage, 512), kernel_size=3, pad=1, param=TWICE, **FILLERS
            )
            n[f"relu{name}"] = L.ReLU(n[f"conv{name}"], in_place=True)
            top = n[f"relu{name}"]
        n[f"pool{stage}"] = L.Pooling(top, pool=P.Pooling.MAX, kernel_size=2, stride=2)
        top = n[f"pool{stage}"]
    for number in (6, 7):
        n[f"fc{number}"] = L.InnerProduct(
            top, num_output=4096, param=TWICE, weight_filler={"type": "gaussian", "std": 0.01}
        )
        n[f"relu{number}"] = L.ReLU(n[f"fc{number}"], in_place=True)
        n[f"drop{number}"] = L.Dropout(n[f"relu{number}"], dropout_ratio=0.5, in_place=True)
        top = n[f"drop{number}"]
    n.fc8 = L.InnerProduct(
        top, num_output=1000, param=TWICE, weight_filler={"type": "gaussian", "std": 0.01}
    )
    return n.fc8


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
