"""Writes FCN-32s and FCN-8s: `python -m prototxt.fcn.generate`.

Layers are named as in the models that the paper's authors released; `coord_map.crop` finds where
the scores are cut.
"""

from __future__ import annotations

from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from poseidon.pycaffe.coord_map import crop
from prototxt.parts import (
    TWICE,
    database,
    dropout,
    family,
    for_both_phases,
    max_pool,
    named,
    put,
    relu,
    write,
)

CLASSES = 21
# The rate of each net, by its stride.
RATES = {32: 1e-10, 8: 1e-14}
BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
MEAN = [104.00699, 116.66877, 122.67892]


def convolution(n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, pad: int) -> Any:
    """Add a convolution and its ReLU."""
    layer = L.Convolution(bottom, num_output=outputs, kernel_size=kernel, pad=pad, param=TWICE)
    return relu(n, put(n, name, layer), f"relu{name.removeprefix('conv')}")


def vgg16(n: NetSpec) -> Any:
    """VGG-16 with its fully-connected layers as convolutions; pad 100 so that even a small
    picture has scores.
    """
    top = n.data
    for block, (outputs, count) in enumerate(BLOCKS, 1):
        for index in range(1, count + 1):
            pad = 100 if block == index == 1 else 1
            top = convolution(n, top, f"conv{block}_{index}", outputs, 3, pad)
        top = max_pool(n, top, f"pool{block}", kernel=2)
    for name, kernel in (("fc6", 7), ("fc7", 1)):
        top = convolution(n, top, name, 4096, kernel, 0)
        top = dropout(n, top, f"drop{name[-1]}", 0.5)
    return top


def score(bottom: Any) -> Any:
    return L.Convolution(bottom, num_output=CLASSES, kernel_size=1, pad=0, param=TWICE)


def upscore(bottom: Any, factor: int) -> Any:
    """Bilinear interpolation, which the solver leaves alone."""
    return L.Deconvolution(
        bottom,
        convolution_param={
            "num_output": CLASSES,
            "kernel_size": 2 * factor,
            "stride": factor,
            "group": CLASSES,
            "bias_term": False,
            "weight_filler": {"type": "bilinear"},
        },
        param=[{"lr_mult": 0}],
    )


def body(n: NetSpec, stride: int) -> Any:
    """From `data` to the scores of each pixel, `score`."""
    n.score_fr = score(vgg16(n))
    if stride == 32:
        n.upscore = upscore(n.score_fr, 32)
    else:
        n.upscore2 = upscore(n.score_fr, 2)
        n.score_pool4 = score(n.pool4)
        n.score_pool4c = crop(n.score_pool4, n.upscore2)
        n.fuse_pool4 = L.Eltwise(n.upscore2, n.score_pool4c, operation=P.Eltwise.SUM)
        n.upscore_pool4 = upscore(n.fuse_pool4, 2)
        n.score_pool3 = score(n.pool3)
        n.score_pool3c = crop(n.score_pool3, n.upscore_pool4)
        n.fuse_pool3 = L.Eltwise(n.upscore_pool4, n.score_pool3c, operation=P.Eltwise.SUM)
        n.upscore8 = upscore(n.fuse_pool3, 8)
    n.score = crop(n.upscore if stride == 32 else n.upscore8, n.data)
    return n.score


def sources(part: str) -> NetSpec:
    """Pictures and their labels: records of two databases that belong together by their order."""
    n, phase = NetSpec(), part.upper()
    for kind in ("image", "label"):
        how = {"transform_param": {"mean_value": MEAN}} if kind == "image" else {}
        source = f"examples/fcn/{part}_{kind}_lmdb"
        n["data" if kind == "image" else "label"] = database(source, 1, phase, **how)
    return n


def train_val(stride: int) -> NetParameter:
    n = sources("train")
    body(n, stride)
    n.loss = L.SoftmaxWithLoss(
        n.score, n.label, loss_param={"ignore_label": 255, "normalize": False}
    )
    n.accuracy = L.Accuracy(
        n.score, n.label, accuracy_param={"ignore_label": 255}, include={"phase": "TEST"}
    )
    return for_both_phases(f"FCN-{stride}s", n, sources("test"))


def deploy(stride: int) -> NetParameter:
    n = NetSpec()
    n.data = L.Input(shape={"dim": [1, 3, 500, 500]})
    body(n, stride)
    return named(f"FCN-{stride}s", n)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    files: dict[str, str] = {}
    for stride, rate in RATES.items():
        files |= family(
            "fcn",
            f"fcn{stride}s",
            f"FCN-{stride}s on PASCAL VOC (Long et al., 2015)",
            train_val(stride),
            deploy(stride),
            {
                "test_iter": 736,
                "test_interval": 4000,
                "base_lr": rate,
                "lr_policy": "fixed",
                "momentum": 0.99,
                "weight_decay": 0.0005,
                "display": 20,
                "average_loss": 20,
                "max_iter": 100000,
                "snapshot": 4000,
            },
            recipe=f"FCN-{stride}s: begins with the weights of VGG-16 (or of the coarser net), one "
            "picture a step, the loss summed over pixels.",
            flags=" --weights=...",
        )
    return files


if __name__ == "__main__":
    write("fcn", definitions())
