"""Writes PSPNet-50: `python -m prototxt.pspnet.generate`.

Layers are named as in the models that the authors released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.backbones import header, solver_text, write

MEAN = (103.939, 116.779, 123.68)
ABOUT = "PSPNet-50 on ADE20K: a dilated ResNet-50 and means over a pyramid of regions."
PAPER = 'Zhao, Shi, Qi, Wang, Jia, "Pyramid scene parsing network" (2017).'
SCRIPT = "prototxt/pspnet/generate.py"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a net.

    Attributes:
        classes: of pixels.
        widths: of the 3x3 convolutions of stages 2 to 5.
        blocks: of these stages.
        pool: channels of each level of the pyramid, and of the last convolution.
        levels: regions a side in each level of the pyramid.
        crop: side of the input, 8 k + 1.
        batch: images of one worker.
        momentum: of the running statistics.
        ignored: the label of pixels that are left out.
        source: the list for training; and for tests.
    """

    classes: int = 150
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    pool: int = 512
    levels: tuple[int, ...] = (1, 2, 3, 6)
    crop: int = 473
    batch: int = 4
    momentum: float = 0.95
    ignored: int = 255
    source: str = "data/ade20k_train.txt"
    test_source: str = "data/ade20k_val.txt"


def unit(
    n: NetSpec,
    top: Any,
    name: str,
    outputs: int,
    kernel: int,
    momentum: float,
    *,
    active: bool = True,
    **how: Any,
) -> Any:
    """Add a convolution, its BN, and its ReLU if active."""
    dilation = how.pop("dilation", 1)
    n[name] = L.Convolution(
        top,
        num_output=outputs,
        kernel_size=kernel,
        pad=dilation * (kernel // 2),
        dilation=dilation,
        bias_term=False,
        weight_filler={"type": "msra"},
        **how,
    )
    n[f"{name}/bn"] = L.BN(
        n[name],
        in_place=True,
        slope_filler={"type": "constant", "value": 1},
        bias_filler={"type": "constant", "value": 0},
        momentum=momentum,
        param=[{"lr_mult": 1, "decay_mult": 0}, {"lr_mult": 1, "decay_mult": 0}],
    )
    if not active:
        return n[f"{name}/bn"]
    n[f"{name}/relu"] = L.ReLU(n[f"{name}/bn"], in_place=True)
    return n[f"{name}/relu"]


def block(
    n: NetSpec, top: Any, name: str, width: int, stride: int, dilation: int, first: bool, m: float
) -> Any:
    """Add a bottleneck."""
    shortcut = top
    if first:
        shortcut = unit(n, top, f"{name}_1x1_proj", 4 * width, 1, m, active=False, stride=stride)
    inner = unit(n, top, f"{name}_1x1_reduce", width, 1, m, stride=stride)
    inner = unit(n, inner, f"{name}_3x3", width, 3, m, dilation=dilation)
    inner = unit(n, inner, f"{name}_1x1_increase", 4 * width, 1, m, active=False)
    n[name] = L.Eltwise(shortcut, inner)
    n[f"{name}/relu"] = L.ReLU(n[name], in_place=True)
    return n[f"{name}/relu"]


def body(n: NetSpec, size: Size) -> Any:
    """From `data` to the scores at an eighth of the extents."""
    m, stem = size.momentum, size.widths[0]
    top = unit(n, n.data, "conv1_1_3x3_s2", stem, 3, m, stride=2)
    top = unit(n, top, "conv1_2_3x3", stem, 3, m)
    top = unit(n, top, "conv1_3_3x3", 2 * stem, 3, m)
    n["pool1_3x3_s2"] = L.Pooling(
        top, pool=P.Pooling.MAX, kernel_size=3, stride=2, pad=1, ceil_mode=False
    )
    top = n["pool1_3x3_s2"]
    for stage, (width, blocks) in enumerate(zip(size.widths, size.blocks, strict=True), 2):
        stride, dilation = (1, 1) if stage == 2 else (2, 1) if stage == 3 else (1, 2 ** (stage - 3))
        for index in range(blocks):
            first = index == 0
            top = block(
                n,
                top,
                f"conv{stage}_{index + 1}",
                width,
                stride if first else 1,
                dilation,
                first,
                m,
            )
    return pyramid(n, top, size)


def pyramid(n: NetSpec, top: Any, size: Size) -> Any:
    """Add the means over regions, resized and concatenated, and the scores."""
    side = (size.crop - 1) // 8 + 1
    levels = [top]
    for level in size.levels:
        kernel = -(-side // level)
        stride = side // level
        name = f"conv5_3_pool{level}"
        n[name] = L.Pooling(
            top,
            pool=P.Pooling.AVE,
            kernel_size=kernel,
            stride=kernel if kernel * level <= side else stride,
        )
        reduced = unit(n, n[name], f"{name}_conv", size.pool, 1, size.momentum)
        n[f"{name}_interp"] = L.Interp(reduced, interp_param={"height": side, "width": side})
        levels.append(n[f"{name}_interp"])
    n.conv5_3_concat = L.Concat(*levels)
    top = unit(n, n.conv5_3_concat, "conv5_4", size.pool, 3, size.momentum)
    n.conv5_4_drop = L.Dropout(top, dropout_ratio=0.1, in_place=True)
    n.conv6 = L.Convolution(
        n.conv5_4_drop,
        num_output=size.classes,
        kernel_size=1,
        param=[{"lr_mult": 10, "decay_mult": 1}, {"lr_mult": 20, "decay_mult": 1}],
        weight_filler={"type": "msra"},
    )
    n.conv6_interp = L.Interp(n.conv6, interp_param={"height": size.crop, "width": size.crop})
    return n.conv6_interp


def source(n: NetSpec, path: str, batch: int, phase: str, crop: int) -> None:
    """Add the tops data and label."""
    n.data, n.label = L.DenseImageData(
        ntop=2,
        include={"phase": phase},
        transform_param={"mean_value": list(MEAN), "mirror": phase == "TRAIN", "crop_size": crop},
        dense_image_data_param={
            "source": path,
            "batch_size": batch,
            "shuffle": phase == "TRAIN",
            "shared_file_system": True,
        },
    )


def train(size: Size = Size()) -> NetParameter:
    """Return the net for training and tests."""
    test = NetSpec()
    source(test, size.test_source, 1, "TEST", size.crop)
    n = NetSpec()
    source(n, size.source, size.batch, "TRAIN", size.crop)
    score = body(n, size)
    n.loss = L.SoftmaxWithLoss(score, n.label, loss_param={"ignore_label": size.ignored})
    n.accuracy = L.Accuracy(
        score, n.label, include={"phase": "TEST"}, accuracy_param={"ignore_label": size.ignored}
    )
    net = n.to_proto()
    layers = [net.layer[0], test.to_proto().layer[0], *net.layer[1:]]
    del net.layer[:]
    net.layer.extend(layers)
    net.name = "pspnet50"
    return net


def deploy(size: Size = Size()) -> NetParameter:
    """Return the net for use."""
    n = NetSpec()
    n.data = L.Input(input_param={"shape": {"dim": [1, 3, size.crop, size.crop]}})
    n.prob = L.Softmax(body(n, size))
    net = n.to_proto()
    net.name = "pspnet50"
    return net


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    run, expect = (
        "prototxt/pspnet/solver.prototxt",
        "0.417 mean IoU on ADE20K's validation set, as the paper.",
    )
    return {
        "train_val.prototxt": header(ABOUT, PAPER, SCRIPT, run=run, expect=expect) + str(train()),
        "deploy.prototxt": header(ABOUT, PAPER, SCRIPT, expect=expect) + str(deploy()),
        "solver.prototxt": solver_text(
            header(ABOUT, PAPER, SCRIPT, run=run, expect=expect),
            "train_val.prototxt",
            {
                "test_iter": 2000,
                "test_interval": 10000,
                "base_lr": 0.01,
                "lr_policy": "poly",
                "power": 0.9,
                "display": 20,
                "momentum": 0.9,
                "max_iter": 150000,
                "weight_decay": 0.0001,
                "snapshot": 10000,
                "snapshot_prefix": "pspnet50",
            },
        ),
    }


if __name__ == "__main__":
    write("pspnet", definitions())
