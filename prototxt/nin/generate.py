"""Writes network in network: `python -m prototxt.nin.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt import parts
from prototxt.imagenet import Recipe
from prototxt.parts import TWICE, dropout, gaussian, max_pool, mean_pool, put, relu, write

# First convolution of each stage: outputs, kernel, stride, pad; then outputs of the two 1x1 that
# follow.
STAGES = (
    (96, 11, 4, 0, (96, 96)),
    (256, 5, 1, 2, (256, 256)),
    (384, 3, 1, 1, (384, 384)),
    (1024, 3, 1, 1, (1024, 1000)),
)


def convolution(
    n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, std: float, **how: int
) -> Any:
    """Add a convolution and its ReLU."""
    fillers = {"weight_filler": gaussian(std), "bias_filler": {"type": "constant"}}
    top = parts.convolution(n, bottom, name, outputs, kernel, param=TWICE, **fillers, **how)
    return relu(n, top, f"relu_{name}")


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `pool4`: the mean of each class's map."""
    top = n.data
    for stage, (outputs, kernel, stride, pad, small) in enumerate(STAGES, 1):
        name = f"conv{stage}" if stage < 4 else "conv4-1024"
        std = 0.01 if stage != 2 else 0.05
        top = convolution(n, top, name, outputs, kernel, std, stride=stride, pad=pad)
        for place, outputs in enumerate(small):
            name = f"cccp{2 * stage - 1 + place}" if stage < 4 else f"cccp{7 + place}-1024"
            last = stage == 4 and place == 1
            top = convolution(n, top, name, outputs, 1, 0.01 if last else 0.05)
        if stage < 4:
            top = max_pool(n, top, f"pool{stage}")
        if stage == 3:
            top = dropout(n, top, "drop", 0.5)
    return put(n, "score", L.Flatten(mean_pool(n, top, "pool4")))


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="nin_imagenet",
        folder="nin",
        about="Network in network on ImageNet: no fully-connected layer; 7,595,176 parameters.",
        paper='Lin, Chen, Yan, "Network in network" (2013), the net of Caffe\'s model zoo.',
        expect="about 0.594 top-1 on the validation pictures, as the authors' model.",
        body=body,
        batch=64,
        solver={
            "base_lr": 0.01,
            "lr_policy": "step",
            "gamma": 0.1,
            "stepsize": 200000,
            "max_iter": 450000,
            "momentum": 0.9,
            "weight_decay": 0.0005,
        },
    ).definitions()


if __name__ == "__main__":
    write("nin", definitions())
