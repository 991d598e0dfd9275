"""Writes the definitions of ResNet-18, 50, 101 and 152 beside this file: `python
prototxt/resnet/generate.py [FOLDER]`.

Layers and blobs are named as in the models that the paper's authors released (res2a_branch2a,
bn2a_branch2a, ...), and a bottleneck takes its stride in the first 1x1 convolution, as theirs do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P

STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
MEAN = [104, 117, 123]


def convolution(
    n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, stride: int, **how: Any
) -> Any:
    """Add a convolution, its normalization and its scale; `name` is the convolution's."""
    how.setdefault("bias_term", False)
    n[name] = L.Convolution(
        bottom,
        num_output=outputs,
        kernel_size=kernel,
        stride=stride,
        pad=kernel // 2,
        weight_filler={"type": "msra"},
        **how,
    )
    suffix = name.removeprefix("res") if name.startswith("res") else f"_{name}"
    n[f"bn{suffix}"] = L.BatchNorm(n[name], in_place=True)
    n[f"scale{suffix}"] = L.Scale(n[f"bn{suffix}"], in_place=True, bias_term=True)
    return n[f"scale{suffix}"]


def relu(n: NetSpec, bottom: Any, name: str) -> Any:
    n[f"{name}_relu"] = L.ReLU(bottom, in_place=True)
    return n[f"{name}_relu"]


def block(
    n: NetSpec, bottom: Any, name: str, width: int, stride: int, *, first: bool, deep: bool
) -> Any:
    """Two 3x3 convolutions, or the bottleneck of the `deep` nets, added to what came in."""
    kernels = (1, 3, 1) if deep else (3, 3)
    outputs = (width, width, 4 * width) if deep else (width, width)
    shortcut = bottom
    if first and (deep or stride > 1):
        shortcut = convolution(n, bottom, f"{name}_branch1", outputs[-1], 1, stride)
    top = bottom
    for index, (kernel, output) in enumerate(zip(kernels, outputs, strict=True)):
        branch = f"{name}_branch2{'abc'[index]}"
        top = convolution(n, top, branch, output, kernel, stride if index == 0 else 1)
        if index < len(kernels) - 1:
            top = relu(n, top, branch)
    n[name] = L.Eltwise(shortcut, top)
    return relu(n, n[name], name)


def block_name(stage: int, index: int, depth: int) -> str:
    """res4b of ResNet-50 is res4b1 in the nets whose stages outgrow the alphabet."""
    if index and depth > 50 and stage in (3, 4):
        return f"res{stage}b{index}"
    return f"res{stage}{'abcdef'[index]}"


def body(n: NetSpec, depth: int) -> Any:
    """From `data` to the scores `fc1000`."""
    top = convolution(n, n.data, "conv1", 64, 7, 2, bias_term=depth == 50)
    n.pool1 = L.Pooling(relu(n, top, "conv1"), pool=P.Pooling.MAX, kernel_size=3, stride=2)
    top = n.pool1
    for position, blocks in enumerate(STAGES[depth]):
        for index in range(blocks):
            stride = 2 if position and index == 0 else 1
            name = block_name(position + 2, index, depth)
            top = block(n, top, name, 64 << position, stride, first=index == 0, deep=depth >= 50)
    n.pool5 = L.Pooling(top, pool=P.Pooling.AVE, global_pooling=True)
    n.fc1000 = L.InnerProduct(
        n.pool5,
        num_output=1000,
        weight_filler={"type": "xavier"},
        param=[{"lr_mult": 1}, {"lr_mult": 2, "decay_mult": 0}],
    )
    return n.fc1000


def data(phase: str, source: str, batch: int) -> Any:
    return L.Data(
        ntop=2,
        include={"phase": phase},
        transform_param={"crop_size": 224, "mean_value": MEAN, "mirror": phase == "TRAIN"},
        data_param={
            "source": source,
            "backend": P.Data.LMDB,
            "batch_size": batch,
            "shared_file_system": True,
        },
    )


def train_val(depth: int) -> str:
    n = NetSpec()
    n.data, n.label = data("TEST", "examples/imagenet/ilsvrc12_val_lmdb", 50)
    test_data = n.to_proto().layer[0]
    n = NetSpec()
    n.data, n.label = data("TRAIN", "examples/imagenet/ilsvrc12_train_lmdb", 32)
    body(n, depth)
    n.loss = L.SoftmaxWithLoss(n.fc1000, n.label)
    n.accuracy = L.Accuracy(n.fc1000, n.label, include={"phase": "TEST"})
    n["accuracy_top5"] = L.Accuracy(n.fc1000, n.label, top_k=5, include={"phase": "TEST"})
    net = n.to_proto()
    layers = [net.layer[0], test_data, *net.layer[1:]]
    del net.layer[:]
    net.layer.extend(layers)
    net.name = f"ResNet-{depth}"
    return str(net)


def deploy(depth: int) -> str:
    n = NetSpec()
    n.data = L.Input(shape={"dim": [1, 3, 224, 224]})
    n.prob = L.Softmax(body(n, depth))
    net = n.to_proto()
    net.name = f"ResNet-{depth}"
    return str(net)


def solver(depth: int) -> str:
    return f"""# ResNet-{depth} on ImageNet: the rate falls to a tenth every 30 epochs of 256 pictures a step (8 workers x 32).
# Run:     poseidon train --solver=prototxt/resnet/resnet{depth}_solver.prototxt

net: "resnet{depth}_train_val.prototxt"
test_iter: 1000
test_interval: 5000
base_lr: 0.1
lr_policy: "step"
gamma: 0.1
stepsize: 150000
momentum: 0.9
weight_decay: 0.0001
display: 20
max_iter: 600000
snapshot: 10000
solver_mode: GPU
"""


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    files = {}
    for depth in STAGES:
        about = f"# ResNet-{depth} on ImageNet (He et al., 2015). Written by generate.py: change that, not this.\n"
        run = (
            f"# Run:     poseidon train --solver=prototxt/resnet/resnet{depth}_solver.prototxt\n\n"
        )
        files[f"resnet{depth}_train_val.prototxt"] = about + run + train_val(depth)
        files[f"resnet{depth}_deploy.prototxt"] = (
            f"{about}# This one is for use after training.\n\n{deploy(depth)}"
        )
        files[f"resnet{depth}_solver.prototxt"] = solver(depth)
    return files


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, text in definitions().items():
        (folder / name).write_text(text)
