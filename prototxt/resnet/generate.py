"""Writes ResNet-18, 50, 101 and 152: `python -m prototxt.resnet.generate`.

Layers and blobs are named as in the models that the paper's authors released (res2a_branch2a,
bn2a_branch2a, ...), and a bottleneck takes its stride in the first 1x1 convolution, as theirs do.
"""

from __future__ import annotations

from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.imagenet import DATA, MEAN, softmax_loss
from prototxt.parts import (
    XAVIER,
    convolution,
    database,
    family,
    for_both_phases,
    max_pool,
    mean_pool,
    named,
    normalized,
    put,
    relu,
    write,
)

STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def unit(
    n: NetSpec,
    bottom: Any,
    name: str,
    outputs: int,
    kernel: int,
    stride: int,
    *,
    bias: bool = False,
) -> Any:
    """Add a convolution, its normalization and its scale; `name` is the convolution's."""
    how = {"stride": stride, "pad": kernel // 2, "bias_term": bias}
    top = convolution(n, bottom, name, outputs, kernel, **how)
    suffix = name.removeprefix("res") if name.startswith("res") else f"_{name}"
    return normalized(n, top, f"bn{suffix}", f"scale{suffix}")


def block(
    n: NetSpec, bottom: Any, name: str, width: int, stride: int, *, first: bool, deep: bool
) -> Any:
    """Two 3x3 convolutions, or the bottleneck of the `deep` nets, added to what came in."""
    kernels = (1, 3, 1) if deep else (3, 3)
    outputs = (width, width, 4 * width) if deep else (width, width)
    shortcut = bottom
    if first and (deep or stride > 1):
        shortcut = unit(n, bottom, f"{name}_branch1", outputs[-1], 1, stride)
    top = bottom
    for index, (kernel, output) in enumerate(zip(kernels, outputs, strict=True)):
        branch = f"{name}_branch2{'abc'[index]}"
        top = unit(n, top, branch, output, kernel, stride if index == 0 else 1)
        if index < len(kernels) - 1:
            top = relu(n, top, f"{branch}_relu")
    return relu(n, put(n, name, L.Eltwise(shortcut, top)), f"{name}_relu")


def block_name(stage: int, index: int, depth: int) -> str:
    """res4b of ResNet-50 is res4b1 in the nets whose stages outgrow the alphabet."""
    if index and depth > 50 and stage in (3, 4):
        return f"res{stage}b{index}"
    return f"res{stage}{'abcdef'[index]}"


def body(n: NetSpec, depth: int) -> Any:
    """From `data` to the scores `fc1000`."""
    top = unit(n, n.data, "conv1", 64, 7, 2, bias=depth == 50)
    top = max_pool(n, relu(n, top, "conv1_relu"), "pool1")
    for position, blocks in enumerate(STAGES[depth]):
        for index in range(blocks):
            stride = 2 if position and index == 0 else 1
            name = block_name(position + 2, index, depth)
            top = block(n, top, name, 64 << position, stride, first=index == 0, deep=depth >= 50)
    n.fc1000 = L.InnerProduct(
        mean_pool(n, top, "pool5"),
        num_output=1000,
        weight_filler=XAVIER,
        param=[{"lr_mult": 1}, {"lr_mult": 2, "decay_mult": 0}],
    )
    return n.fc1000


def data(phase: str, part: str, batch: int) -> NetSpec:
    """Return the data layer of a phase."""
    n = NetSpec()
    transform = {"crop_size": 224, "mean_value": list(MEAN), "mirror": phase == "TRAIN"}
    n.data, n.label = database(DATA.format(part), batch, phase, ntop=2, transform_param=transform)
    return n


def train_val(depth: int) -> NetParameter:
    n = data("TRAIN", "train", 32)
    softmax_loss(n, body(n, depth))
    return for_both_phases(f"ResNet-{depth}", n, data("TEST", "val", 50))


def deploy(depth: int) -> NetParameter:
    n = NetSpec()
    n.data = L.Input(shape={"dim": [1, 3, 224, 224]})
    n.prob = L.Softmax(body(n, depth))
    return named(f"ResNet-{depth}", n)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    files: dict[str, str] = {}
    for depth in STAGES:
        files |= family(
            "resnet",
            f"resnet{depth}",
            f"ResNet-{depth} on ImageNet (He et al., 2015)",
            train_val(depth),
            deploy(depth),
            {
                "test_iter": 1000,
                "test_interval": 5000,
                "base_lr": 0.1,
                "lr_policy": "step",
                "gamma": 0.1,
                "stepsize": 150000,
                "momentum": 0.9,
                "weight_decay": 0.0001,
                "display": 20,
                "max_iter": 600000,
                "snapshot": 10000,
            },
            recipe=f"ResNet-{depth} on ImageNet: the rate falls to a tenth every 30 epochs of 256 "
            "pictures a step (8 workers x 32).",
        )
    return files


if __name__ == "__main__":
    write("resnet", definitions())
