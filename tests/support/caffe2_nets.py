"""Nets of Caffe2 for exports: what its examples build, and nets with the operators of its model
zoo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from poseidon.caffe2 import brew, core, gru_cell, model_helper, rnn_cell, workspace
from poseidon.caffe2.export.files import Predictor
from poseidon.caffe2.models import resnet, shufflenet

Build = Callable[[model_helper.ModelHelper], Any]


@dataclass(frozen=True)
class Case:
    """A net: its builder returns the output, or a list of outputs; shapes and types of its
    inputs.
    """

    build: Build
    inputs: dict[str, tuple[tuple[int, ...], str]]
    order: str = "NCHW"


def images(side: int, channels: int = 3, batch: int = 2) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"data": ((batch, channels, side, side), "float32")}


def conv(model: Any, x: Any, name: str, wide: int, deep: int, kernel: int, **settings: Any) -> Any:
    y = brew.conv(
        model,
        x,
        name,
        wide,
        deep,
        kernel,
        weight_init=("MSRAFill", {}),
        bias_init=NOISE,
        **settings,
    )
    return brew.relu(model, y, y)


def dense(model: Any, x: Any, name: str, wide: int, deep: int) -> Any:
    return brew.fc(model, x, name, wide, deep, weight_init=("XavierFill", {}), bias_init=NOISE)


NOISE = ("GaussianFill", {"std": 0.1})


def lenet(model: Any) -> Any:
    x = brew.conv(model, "data", "conv1", 1, 20, 5)
    x = brew.max_pool(model, x, "pool1", kernel=2, stride=2)
    x = brew.conv(model, x, "conv2", 20, 50, 5)
    x = brew.max_pool(model, x, "pool2", kernel=2, stride=2)
    x = brew.relu(model, dense(model, x, "fc3", 800, 500), "fc3")
    return brew.softmax(model, dense(model, x, "pred", 500, 10), "softmax")


def lenet_nhwc(model: Any) -> Any:
    x = brew.conv(model, "data", "conv1", 1, 20, 5, order="NHWC")
    x = brew.spatial_bn(model, x, "bn1", 20, is_test=True, order="NHWC")
    x = brew.max_pool(model, x, "pool1", kernel=2, stride=2, order="NHWC")
    x = brew.average_pool(model, x, "pool2", kernel=3, stride=2, pad=1, order="NHWC")
    return brew.softmax(model, dense(model, x, "pred", 7 * 7 * 20, 10), "softmax")


def alexnet(model: Any) -> Any:
    x = conv(model, "data", "conv1", 3, 96, 11, stride=4)
    x = brew.lrn(model, x, "norm1", size=5, alpha=1e-4, beta=0.75, bias=1.0)
    x = brew.max_pool(model, x, "pool1", kernel=3, stride=2)
    x = conv(model, x, "conv2", 96, 256, 5, pad=2, group=2)
    x = brew.lrn(model, x, "norm2", size=5, alpha=1e-4, beta=0.75, bias=1.0)
    x = brew.max_pool(model, x, "pool2", kernel=3, stride=2)
    x = conv(model, x, "conv3", 256, 384, 3, pad=1)
    x = conv(model, x, "conv4", 384, 384, 3, pad=1, group=2)
    x = conv(model, x, "conv5", 384, 256, 3, pad=1, group=2)
    x = brew.max_pool(model, x, "pool5", kernel=3, stride=2)
    for index, (wide, deep) in enumerate(((256 * 36, 4096), (4096, 4096)), 6):
        x = brew.relu(model, dense(model, x, f"fc{index}", wide, deep), f"fc{index}")
        x = brew.dropout(model, x, f"drop{index}", ratio=0.5, is_test=1)
    return brew.softmax(model, dense(model, x, "fc8", 4096, 1000), "prob")


def vgg16(model: Any) -> Any:
    x, wide = "data", 3
    for block, (deep, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for index in range(1, count + 1):
            x, wide = conv(model, x, f"conv{block}_{index}", wide, deep, 3, pad=1), deep
        x = brew.max_pool(model, x, f"pool{block}", kernel=2, stride=2)
    for index, (wide, deep) in enumerate(((512 * 49, 4096), (4096, 4096)), 6):
        x = brew.relu(model, dense(model, x, f"fc{index}", wide, deep), f"fc{index}")
    return brew.softmax(model, dense(model, x, "fc8", 4096, 1000), "prob")


def squeezenet(model: Any) -> Any:
    x = conv(model, "data", "conv1", 3, 64, 3, stride=2)
    x, wide = brew.max_pool(model, x, "pool1", kernel=3, stride=2), 64
    for index, (small, deep) in enumerate(((16, 64), (16, 64), (32, 128), (32, 128), (48, 192)), 2):
        s = conv(model, x, f"fire{index}/squeeze", wide, small, 1)
        parts = [conv(model, s, f"fire{index}/e{k}", small, deep, k, pad=k // 2) for k in (1, 3)]
        x, wide = brew.concat(model, parts, f"fire{index}/concat"), 2 * deep
        if index in (3, 5):
            x = brew.max_pool(model, x, f"pool{index}", kernel=3, stride=2)
    x = brew.dropout(model, x, "drop", ratio=0.5, is_test=1)
    x = conv(model, x, "conv10", wide, 1000, 1)
    return brew.softmax(model, brew.average_pool(model, x, "pool10", global_pooling=1), "prob")


def googlenet(model: Any) -> Any:
    x = conv(model, "data", "conv1", 3, 64, 7, stride=2, pad=3)
    x = model.net.MaxPool(x, "pool1", kernel=3, stride=2, legacy_pad=3)
    x = brew.lrn(model, x, "norm1", size=5, alpha=1e-4, beta=0.75, bias=1.0)
    x = conv(model, conv(model, x, "conv2/reduce", 64, 64, 1), "conv2", 64, 192, 3, pad=1)
    x, wide = model.net.MaxPool(x, "pool2", kernel=3, stride=2, legacy_pad=3), 192
    for name, a, b0, b, c0, c, d in (
        ("3a", 64, 96, 128, 16, 32, 32),
        ("3b", 128, 128, 192, 32, 96, 64),
    ):
        x = brew.concat(
            model,
            [
                conv(model, x, f"{name}/1", wide, a, 1),
                conv(
                    model, conv(model, x, f"{name}/3r", wide, b0, 1), f"{name}/3", b0, b, 3, pad=1
                ),
                conv(
                    model, conv(model, x, f"{name}/5r", wide, c0, 1), f"{name}/5", c0, c, 5, pad=2
                ),
                conv(
                    model,
                    brew.max_pool(model, x, f"{name}/pool", kernel=3, stride=1, pad=1),
                    f"{name}/proj",
                    wide,
                    d,
                    1,
                ),
            ],
            f"{name}/out",
        )
        wide = a + b + c + d
    x = brew.average_pool(model, x, "pool5", global_pooling=1)
    return brew.softmax(model, dense(model, x, "fc", wide, 1000), "prob")


def densenet(model: Any) -> Any:
    x, wide = conv(model, "data", "conv0", 3, 32, 3, pad=1), 32
    for index in range(6):
        y = brew.spatial_bn(model, x, f"bn{index}", wide, is_test=True)
        scale, shift = (model.create_param(f"{k}{index}", [wide], _noise(model)) for k in "sb")
        y = model.net.Mul([y, scale], f"mul{index}", broadcast=1, axis=1)
        y = model.net.Add([y, shift], f"add{index}", broadcast=1, axis=1)
        y = conv(model, brew.relu(model, y, y), f"conv{index + 1}", wide, 16, 3, pad=1)
        x, wide = brew.concat(model, [x, y], f"concat{index}"), wide + 16
    x = brew.average_pool(model, x, "pool", global_pooling=1)
    x = conv(model, x, "fc", wide, 10, 1)
    return brew.softmax(model, model.net.Squeeze(x, "scores", dims=[2, 3]), "prob")


def _noise(model: Any) -> Any:
    from poseidon.caffe2.modeling.initializers import Initializer

    return Initializer("GaussianFill", std=0.5)


def style_transfer(model: Any) -> Any:
    x = model.net.PadImage("data", "pad", pad=8, mode="reflect")
    x, wide = conv(model, x, "conv1", 3, 16, 9), 16
    for index in range(3):
        y = model.net.PadImage(x, f"pad{index}", pad=1, mode="edge")
        y = conv(model, y, f"res{index}", wide, wide, 3)
        y = brew.instance_norm(model, y, f"norm{index}", wide)
        x = model.net.Sum([x, y[0] if isinstance(y, tuple | list) else y], f"sum{index}")
    x = model.net.ResizeNearest(x, "up", width_scale=2.0, height_scale=2.0)
    x = brew.conv_transpose(model, x, "deconv", wide, 8, 4, stride=2, pad=1)
    x = brew.prelu(model, x, "prelu", num_channels=8)
    x = brew.conv(model, x, "out", 8, 3, 3, pad=1)
    return model.net.Scale(model.net.Tanh(x, "tanh"), "pixels", scale=127.5)


def pyramid(model: Any) -> Any:
    x = conv(model, "data", "res2", 3, 16, 3, stride=2, pad=1)
    deep = model.net.AffineChannel(
        [conv(model, x, "res3", 16, 32, 3, stride=2, pad=1), "res3_s", "res3_b"], "res3_bn"
    )
    for name in ("res3_s", "res3_b"):
        model.param_init_net.GaussianFill([], name, shape=[32], std=0.5)
        model.params.append(core.BlobReference(name))
    top = brew.conv(model, deep, "lateral3", 32, 16, 1)
    up = model.net.ResizeNearest(top, "up", width_scale=2.0, height_scale=2.0)
    merged = brew.sum(model, [up, brew.conv(model, x, "lateral2", 16, 16, 1)], "fpn2")
    rois = model.net.RoIAlign(
        [merged, "rois"], "roi", spatial_scale=0.5, pooled_h=7, pooled_w=7, sampling_ratio=2
    )
    x = brew.relu(model, dense(model, rois, "fc6", 16 * 49, 32), "fc6")
    return [
        brew.softmax(model, dense(model, x, "cls", 32, 5), "cls_prob"),
        dense(model, x, "box", 32, 20),
    ]


def resnet50(model: Any) -> Any:
    return resnet.create_resnet50(
        model, "data", num_input_channels=3, num_labels=1000, is_test=True, no_loss=True
    )


def resnext50(model: Any) -> Any:
    return resnet.create_resnext(
        model,
        "data",
        num_input_channels=3,
        num_labels=10,
        num_layers=50,
        num_groups=32,
        num_width_per_group=4,
        is_test=True,
        no_loss=True,
    )


def resnet32(model: Any) -> Any:
    resnet.create_resnet_32x32(
        model, "data", num_input_channels=3, num_groups=2, num_labels=10, is_test=True
    )
    return "last_out"


def shuffled(model: Any) -> Any:
    return shufflenet.create_shufflenet(model, "data", 3, 1000, is_test=True, no_loss=True)


def language_model(model: Any) -> Any:
    x = model.net.Gather(["words_w", "words"], "embedded")
    model.param_init_net.GaussianFill([], "words_w", shape=[20, 8])
    model.params.append(core.BlobReference("words_w"))
    hidden, _, _, _ = rnn_cell.LSTM(
        model, x, "lengths", ("h0", "c0"), 8, 12, "lstm", forget_bias=1.0, forward_only=True
    )
    return brew.softmax(model, brew.fc(model, hidden, "pred", 12, 20, axis=2), "prob", axis=2)


def gated(model: Any) -> Any:
    hidden, _ = gru_cell.GRU(model, "data", "lengths", ("h0",), 6, 8, "gru", forward_only=True)
    return hidden


def clicks(model: Any) -> Any:
    model.param_init_net.GaussianFill([], "table", shape=[30, 8])
    model.params.append(core.BlobReference("table"))
    sparse = model.net.SparseLengthsSum(["table", "ids", "lengths"], "bag")
    x = brew.concat(
        model,
        [brew.relu(model, dense(model, "dense", "bottom", 4, 8), "bottom"), sparse],
        "both",
        axis=1,
    )
    norm = brew.layer_norm(model, x, "norm", 16)
    x = norm[0] if isinstance(norm, tuple | list) else norm
    return model.net.Sigmoid(dense(model, x, "top", 16, 1), "click")


F, WHOLE = "float32", "int32"
NETS: dict[str, Case] = {
    "lenet": Case(lenet, images(28, 1)),
    "lenet in NHWC": Case(lenet_nhwc, {"data": ((2, 32, 32, 1), F)}, order="NHWC"),
    "alexnet": Case(alexnet, images(227)),
    "vgg16": Case(vgg16, images(224, batch=1)),
    "squeezenet": Case(squeezenet, images(224)),
    "googlenet, to inception 3b": Case(googlenet, images(224)),
    "densenet, 6 layers": Case(densenet, images(32)),
    "style transfer": Case(style_transfer, images(64)),
    "feature pyramid with RoIAlign": Case(pyramid, images(64, batch=1) | {"rois": ((5, 5), F)}),
    "models.resnet, 50 layers": Case(resnet50, images(224, batch=1)),
    "models.resnet, ResNeXt-50": Case(resnext50, images(224, batch=1)),
    "models.resnet, 32x32": Case(resnet32, images(32)),
    "models.shufflenet": Case(shuffled, images(224, batch=1)),
    "LSTM over words": Case(
        language_model,
        {
            "words": ((5, 2), WHOLE),
            "lengths": ((2,), WHOLE),
            "h0": ((1, 2, 12), F),
            "c0": ((1, 2, 12), F),
        },
    ),
    "GRU": Case(gated, {"data": ((4, 2, 6), F), "lengths": ((2,), WHOLE), "h0": ((1, 2, 8), F)}),
    "embedding bag": Case(
        clicks, {"dense": ((2, 4), F), "ids": ((5,), WHOLE), "lengths": ((2,), WHOLE)}
    ),
}
SMALL = (
    "lenet",
    "lenet in NHWC",
    "densenet, 6 layers",
    "style transfer",
    "feature pyramid with RoIAlign",
)
SMALL += ("LSTM over words", "GRU", "embedding bag")


def built(name: str) -> Predictor:
    """Build a net in the current workspace, with random parameters and statistics."""
    workspace.ResetWorkspace()
    case = NETS[name]
    with core.DeviceScope(core.DeviceOption(0)):
        model = model_helper.ModelHelper(name=name.split(",")[0], arg_scope={"order": case.order})
        made = case.build(model)
    outputs = made if isinstance(made, list) else [made]
    model.param_init_net.Proto().name = "init"
    workspace.RunNetOnce(model.param_init_net)
    names = [str(p) for p in (*model.GetAllParams(), *model.GetComputedParams())]
    rng = np.random.RandomState(1)
    for each in dict.fromkeys(names):
        value = workspace.FetchBlob(each)
        if each.endswith("_riv"):
            workspace.FeedBlob(each, rng.uniform(0.5, 1.5, value.shape).astype(np.float32))
        elif not value.any():
            workspace.FeedBlob(each, (0.05 * rng.randn(*value.shape)).astype(np.float32))
    return Predictor(
        net=model.net.Proto(),
        parameters={
            each: torch.from_numpy(np.array(workspace.FetchBlob(each)))
            for each in [*names, *constants(model)]
            if each not in case.inputs
        },
        inputs=dict(case.inputs),
        outputs=tuple(str(output) for output in outputs),
    )


def constants(model: Any) -> list[str]:
    """Blobs that the init net makes besides the parameters."""
    return [name for op in model.param_init_net.Proto().op for name in op.output]


def inputs_of(predictor: Predictor, batch: int | None = None) -> dict[str, np.ndarray]:
    """Random inputs: indices, lengths of which the first is the longest, and regions."""
    rng = np.random.RandomState(2)
    found: dict[str, np.ndarray] = {}
    for name, (shape, dtype) in predictor.inputs.items():
        shape = shape if batch is None else (batch, *shape[1:])
        if name == "lengths":
            found[name] = np.array([3, 2], np.int32)
        elif dtype == "int32":
            found[name] = rng.randint(0, 20, shape).astype(np.int32)
        elif name == "rois":
            low = rng.uniform(0, 30, (shape[0], 2))
            rows = [np.zeros((shape[0], 1)), low, low + rng.uniform(2, 30, (shape[0], 2))]
            found[name] = np.concatenate(rows, 1).astype(np.float32)
        else:
            found[name] = rng.randn(*shape).astype(np.float32)
    return found


def results(predictor: Predictor, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the net computes in the current workspace."""
    for name, value in given.items():
        workspace.FeedBlob(name, value)
    for name, tensor in predictor.parameters.items():
        workspace.FeedBlob(name, tensor.numpy())
    workspace.RunNetOnce(predictor.net)
    return [workspace.FetchBlob(name) for name in predictor.outputs]
