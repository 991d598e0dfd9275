"""Writes GoogLeNet as Caffe's bvlc_googlenet: `python -m prototxt.googlenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.imagenet import TWICE, Recipe, write

# Outputs of 1x1, 3x3_reduce, 3x3, 5x5_reduce, 5x5 and pool_proj.
MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
FILLERS = {"weight_filler": {"type": "xavier"}, "bias_filler": {"type": "constant", "value": 0.2}}
# The module after which each loss half way stands.
SIDES = {"4a": "loss1", "4d": "loss2"}


def convolution(n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, **how: int) -> Any:
    """Add a convolution and its ReLU."""
    n[name] = L.Convolution(
        bottom, num_output=outputs, kernel_size=kernel, param=TWICE, **how, **FILLERS
    )
    folder, _, last = name.rpartition("/")
    n[f"{folder}/relu_{last}"] = L.ReLU(n[name], in_place=True)
    return n[f"{folder}/relu_{last}"]


def max_pool(n: NetSpec, bottom: Any, name: str, **how: int) -> Any:
    n[name] = L.Pooling(bottom, pool=P.Pooling.MAX, kernel_size=3, **how)
    return n[name]


def inception(n: NetSpec, bottom: Any, name: str) -> Any:
    one, reduce_three, three, reduce_five, five, pool = MODULES[name]
    at = f"inception_{name}"
    ways = [convolution(n, bottom, f"{at}/1x1", one, 1)]
    small = convolution(n, bottom, f"{at}/3x3_reduce", reduce_three, 1)
    ways.append(convolution(n, small, f"{at}/3x3", three, 3, pad=1))
    small = convolution(n, bottom, f"{at}/5x5_reduce", reduce_five, 1)
    ways.append(convolution(n, small, f"{at}/5x5", five, 5, pad=2))
    pooled = max_pool(n, bottom, f"{at}/pool", stride=1, pad=1)
    ways.append(convolution(n, pooled, f"{at}/pool_proj", pool, 1))
    n[f"{at}/output"] = L.Concat(*ways)
    return n[f"{at}/output"]


def classifier(n: NetSpec, bottom: Any, name: str, outputs: int, bias: float) -> Any:
    n[name] = L.InnerProduct(
        bottom,
        num_output=outputs,
        param=TWICE,
        weight_filler={"type": "xavier"},
        bias_filler={"type": "constant", "value": bias},
    )
    return n[name]


def scored(n: NetSpec, scores: Any, at: str, number: int, weight: float) -> None:
    """Add a softmax loss, and the scores of tests."""
    n[f"{at}/loss{number}"] = L.SoftmaxWithLoss(scores, n.label, loss_weight=weight)
    n[f"{at}/top-1"] = L.Accuracy(scores, n.label, include={"phase": "TEST"})
    n[f"{at}/top-5"] = L.Accuracy(scores, n.label, top_k=5, include={"phase": "TEST"})


def side_loss(n: NetSpec, bottom: Any, name: str) -> None:
    n[f"{name}/ave_pool"] = L.Pooling(bottom, pool=P.Pooling.AVE, kernel_size=5, stride=3)
    n[f"{name}/conv"] = L.Convolution(
        n[f"{name}/ave_pool"], num_output=128, kernel_size=1, param=TWICE, **FILLERS
    )
    n[f"{name}/relu_conv"] = L.ReLU(n[f"{name}/conv"], in_place=True)
    hidden = classifier(n, n[f"{name}/relu_conv"], f"{name}/fc", 1024, 0.2)
    n[f"{name}/relu_fc"] = L.ReLU(hidden, in_place=True)
    n[f"{name}/drop_fc"] = L.Dropout(n[f"{name}/relu_fc"], dropout_ratio=0.7, in_place=True)
    scores = classifier(n, n[f"{name}/drop_fc"], f"{name}/classifier", 1000, 0)
    scored(n, scores, name, 1 if name == "loss1" else 2, 0.3)


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `loss3/classifier`; in training with the losses half way."""
    top = convolution(n, n.data, "conv1/7x7_s2", 64, 7, stride=2, pad=3)
    top = max_pool(n, top, "pool1/3x3_s2", stride=2)
    n["pool1/norm1"] = L.LRN(top, local_size=5, alpha=1e-4, beta=0.75)
    top = convolution(n, n["pool1/norm1"], "conv2/3x3_reduce", 64, 1)
    top = convolution(n, top, "conv2/3x3", 192, 3, pad=1)
    n["conv2/norm2"] = L.LRN(top, local_size=5, alpha=1e-4, beta=0.75)
    top = max_pool(n, n["conv2/norm2"], "pool2/3x3_s2", stride=2)
    for name in MODULES:
        top = inception(n, top, name)
        if train and name in SIDES:
            side_loss(n, top, SIDES[name])
        if name in ("3b", "4e"):
            top = max_pool(n, top, f"pool{int(name[0])}/3x3_s2", stride=2)
    n["pool5/7x7_s1"] = L.Pooling(top, pool=P.Pooling.AVE, kernel_size=7, stride=1)
    n["pool5/drop_7x7_s1"] = L.Dropout(n["pool5/7x7_s1"], dropout_ratio=0.4, in_place=True)
    return classifier(n, n["pool5/drop_7x7_s1"], "loss3/classifier", 1000, 0)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="GoogleNet",
        folder="googlenet",
        about="GoogLeNet on ImageNet: nine inception modules, three losses; 13,378,280 "
        "parameters, 6,998,552 of them for use.",
        paper='Szegedy et al., "Going deeper with convolutions" (2014), as in Caffe\'s '
        "bvlc_googlenet.",
        expect="about 0.687 top-1 and 0.889 top-5 on the validation pictures, as Caffe's model.",
        body=body,
        heads=lambda n, scores: scored(n, scores, "loss3", 3, 1),
        solver={
            "base_lr": 0.01,
            "lr_policy": "poly",
            "power": 0.5,
            "max_iter": 2400000,
            "momentum": 0.9,
            "weight_decay": 0.0002,
        },
    ).definitions()


if __name__ == "__main__":
    write("googlenet", definitions())
