"""Writes GoogLeNet as Caffe's bvlc_googlenet: `python -m prototxt.googlenet.generate`."""

from __future__ import annotations

from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt import parts
from prototxt.imagenet import Recipe
from prototxt.parts import (
    TWICE,
    XAVIER,
    constant,
    dropout,
    max_pool,
    mean_pool,
    put,
    relu,
    write,
)

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
FILLERS = {"weight_filler": XAVIER, "bias_filler": constant(0.2)}
# The module after which each loss half way stands.
SIDES = {"4a": "loss1", "4d": "loss2"}


def convolution(n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, **how: Any) -> Any:
    """Add a convolution and its ReLU."""
    how |= {"param": TWICE, **FILLERS}
    folder, _, last = name.rpartition("/")
    top = parts.convolution(n, bottom, name, outputs, kernel, **how)
    return relu(n, top, f"{folder}/relu_{last}")


def normalized(n: NetSpec, bottom: Any, name: str) -> Any:
    """Add normalization over channels."""
    return put(n, name, L.LRN(bottom, local_size=5, alpha=1e-4, beta=0.75))


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
    return put(n, f"{at}/output", L.Concat(*ways))


def classifier(n: NetSpec, bottom: Any, name: str, outputs: int, bias: float) -> Any:
    full = L.InnerProduct(
        bottom, num_output=outputs, param=TWICE, weight_filler=XAVIER, bias_filler=constant(bias)
    )
    return put(n, name, full)


def scored(n: NetSpec, scores: Any, at: str, number: int, weight: float) -> None:
    """Add a softmax loss, and the scores of tests."""
    n[f"{at}/loss{number}"] = L.SoftmaxWithLoss(scores, n.label, loss_weight=weight)
    n[f"{at}/top-1"] = L.Accuracy(scores, n.label, include={"phase": "TEST"})
    n[f"{at}/top-5"] = L.Accuracy(scores, n.label, top_k=5, include={"phase": "TEST"})


def side_loss(n: NetSpec, bottom: Any, name: str) -> None:
    top = mean_pool(n, bottom, f"{name}/ave_pool", kernel_size=5, stride=3)
    top = convolution(n, top, f"{name}/conv", 128, 1)
    top = relu(n, classifier(n, top, f"{name}/fc", 1024, 0.2), f"{name}/relu_fc")
    top = dropout(n, top, f"{name}/drop_fc", 0.7)
    scores = classifier(n, top, f"{name}/classifier", 1000, 0)
    scored(n, scores, name, 1 if name == "loss1" else 2, 0.3)


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `loss3/classifier`; in training with the losses half way."""
    top = convolution(n, n.data, "conv1/7x7_s2", 64, 7, stride=2, pad=3)
    top = normalized(n, max_pool(n, top, "pool1/3x3_s2"), "pool1/norm1")
    top = convolution(n, top, "conv2/3x3_reduce", 64, 1)
    top = convolution(n, top, "conv2/3x3", 192, 3, pad=1)
    top = max_pool(n, normalized(n, top, "conv2/norm2"), "pool2/3x3_s2")
    for name in MODULES:
        top = inception(n, top, name)
        if train and name in SIDES:
            side_loss(n, top, SIDES[name])
        if name in ("3b", "4e"):
            top = max_pool(n, top, f"pool{name[0]}/3x3_s2")
    top = mean_pool(n, top, "pool5/7x7_s1", kernel_size=7, stride=1)
    top = dropout(n, top, "pool5/drop_7x7_s1", 0.4)
    return classifier(n, top, "loss3/classifier", 1000, 0)


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
