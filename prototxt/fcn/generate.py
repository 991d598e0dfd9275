"""Writes the definitions of FCN-32s and FCN-8s beside this file: `python
prototxt/fcn/generate.py [FOLDER]`.

Layers are named as in the models that the paper's authors released; `coord_map.crop` finds where
the scores are cut.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from poseidon.pycaffe.coord_map import crop

CLASSES = 21
NETS = (32, 8)
BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
MEAN = [104.00699, 116.66877, 122.67892]
LEARNED = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]


def convolution(n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, pad: int) -> Any:
    """Add a convolution and its ReLU."""
    n[name] = L.Convolution(bottom, num_output=outputs, kernel_size=kernel, pad=pad, param=LEARNED)
    n[f"relu{name.removeprefix('conv')}"] = L.ReLU(n[name], in_place=True)
    return n[f"relu{name.removeprefix('conv')}"]


def vgg16(n: NetSpec) -> Any:
    """VGG-16 with its fully-connected layers as convolutions; pad 100 so that even a small
    picture has scores.
    """
    top = n.data
    for block, (outputs, count) in enumerate(BLOCKS, 1):
        for index in range(1, count + 1):
            pad = 100 if block == index == 1 else 1
            top = convolution(n, top, f"conv{block}_{index}", outputs, 3, pad)
        n[f"pool{block}"] = L.Pooling(top, pool=P.Pooling.MAX, kernel_size=2, stride=2)
        top = n[f"pool{block}"]
    for name, kernel in (("fc6", 7), ("fc7", 1)):
        top = convolution(n, top, name, 4096, kernel, 0)
        n[f"drop{name[-1]}"] = L.Dropout(top, dropout_ratio=0.5, in_place=True)
        top = n[f"drop{name[-1]}"]
    return top


def score(bottom: Any) -> Any:
    return L.Convolution(bottom, num_output=CLASSES, kernel_size=1, pad=0, param=LEARNED)


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


def database(kind: str, part: str, **how: Any) -> Any:
    """Pictures or their labels: records of two databases that belong together by their order."""
    return L.Data(
        include={"phase": part.upper()},
        data_param={
            "source": f"examples/fcn/{part}_{kind}_lmdb",
            "backend": P.Data.LMDB,
            "batch_size": 1,
            "shared_file_system": True,
        },
        **how,
    )


def sources(part: str) -> NetSpec:
    n = NetSpec()
    n.data = database("image", part, transform_param={"mean_value": MEAN})
    n.label = database("label", part)
    return n


def train_val(stride: int) -> str:
    test_sources = list(sources("test").to_proto().layer)
    n = sources("train")
    body(n, stride)
    n.loss = L.SoftmaxWithLoss(
        n.score, n.label, loss_param={"ignore_label": 255, "normalize": False}
    )
    n.accuracy = L.Accuracy(
        n.score, n.label, accuracy_param={"ignore_label": 255}, include={"phase": "TEST"}
    )
    net = n.to_proto()
    rest = [layer for layer in net.layer if layer.type != "Data"]
    layers = [*(layer for layer in net.layer if layer.type == "Data"), *test_sources, *rest]
    del net.layer[:]
    net.layer.extend(layers)
    net.name = f"FCN-{stride}s"
    return str(net)


def deploy(stride: int) -> str:
    n = NetSpec()
    n.data = L.Input(shape={"dim": [1, 3, 500, 500]})
    body(n, stride)
    net = n.to_proto()
    net.name = f"FCN-{stride}s"
    return str(net)


def solver(stride: int) -> str:
    rate = {32: "1e-10", 8: "1e-14"}[stride]
    return f"""# FCN-{stride}s: begins with the weights of VGG-16 (or of the coarser net), one picture a step, the loss summed over pixels.
# Run:     poseidon train --solver=prototxt/fcn/fcn{stride}s_solver.prototxt --weights=...

net: "fcn{stride}s_train_val.prototxt"
test_iter: 736
test_interval: 4000
base_lr: {rate}
lr_policy: "fixed"
momentum: 0.99
weight_decay: 0.0005
display: 20
average_loss: 20
max_iter: 100000
snapshot: 4000
solver_mode: GPU
"""


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    files = {}
    for stride in NETS:
        about = f"# FCN-{stride}s on PASCAL VOC (Long et al., 2015). Written by generate.py: change that, not this.\n"
        run = f"# Run:     poseidon train --solver=prototxt/fcn/fcn{stride}s_solver.prototxt --weights=...\n\n"
        files[f"fcn{stride}s_train_val.prototxt"] = about + run + train_val(stride)
        files[f"fcn{stride}s_deploy.prototxt"] = (
            f"{about}# This one is for use after training.\n\n{deploy(stride)}"
        )
        files[f"fcn{stride}s_solver.prototxt"] = solver(stride)
    return files


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, text in definitions().items():
        (folder / name).write_text(text)
