"""Writes network in network: `python -m prototxt.nin.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.imagenet import TWICE, Recipe, write

# First convolution of each stage: outputs, kernel, stride, pad; then outputs of the two 1x1 that
# follow.
STAGES = (
    (96, 11, 4, 0, (96, 96)),
    (256, 5, 1, 2, (256, 256)),
    (384, 3, 1, 1, (384, 384)),
    (1024, 3, 1, 1, (1024, 1000)),
)


def convolution(n: NetSpec, bottom: Any, name: str, outputs: int, std: float, **how: int) -> Any:
    n[name] = L.Convolution(
        bottom,
        num_output=outputs,
        param=TWICE,
        weight_filler={"type": "gaussian", "std": std},
        bias_filler={"type": "constant"},
        **how,
    )
    n[f"relu_{name}"] = L.ReLU(n[name], in_place=True)
    return n[f"relu_{name}"]


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `pool4`: the mean of each class's map."""
    top = n.data
    for stage, (outputs, kernel, stride, pad, small) in enumerate(STAGES, 1):
        name = f"conv{stage}" if stage < 4 else "conv4-1024"
        top = convolution(
            n,
            top,
            name,
            outputs,
            0.01 if stage != 2 else 0.05,
            kernel_size=kernel,
            stride=stride,
            pad=pad,
        )
        for place, outputs in enumerate(small):
            name = f"cccp{2 * stage - 1 + place}" if stage < 4 else f"cccp{7 + place}-1024"
            last = stage == 4 and place == 1
            top = convolution(n, top, name, outputs, 0.01 if last else 0.05, kernel_size=1)
        if stage < 4:
            n[f"pool{stage}"] = L.Pooling(top, pool=P.Pooling.MAX, kernel_size=3, stride=2)
            top = n[f"pool{stage}"]
        if stage == 3:
            n.drop = L.Dropout(top, dropout_ratio=0.5, in_place=True)
            top = n.drop
    n.pool4 = L.Pooling(top, pool=P.Pooling.AVE, global_pooling=True)
    n.score = L.Flatten(n.pool4)
    return n.score


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
