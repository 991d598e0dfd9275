"""A small classifier to parallelize, and the same batches for any number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import brew, core, data_parallel_model, model_helper, optimizer, workspace
from poseidon.caffe2.optimizer.base import reset_optimizer_instance_count

FEATURES, CLASSES = 6, 4


def add_layers(model: Any, loss_scale: float) -> list[Any]:
    """Two layers, a softmax, and the scaled loss."""
    brew.fc(model, "data", "fc1", dim_in=FEATURES, dim_out=5)
    brew.tanh(model, "fc1", "fc1")
    brew.fc(model, "fc1", "fc2", dim_in=5, dim_out=CLASSES)
    _, loss = model.net.SoftmaxWithLoss(["fc2", "label"], ["softmax", "loss"])
    return [model.net.Scale(loss, "scaled_loss", scale=loss_scale)]


def add_sgd(model: Any) -> Any:
    """Momentum SGD with weight decay."""
    optimizer.add_weight_decay(model, 0.01)
    return optimizer.build_sgd(model, 0.1, momentum=0.9)


def build(devices: Sequence[int], **arguments: Any) -> Any:
    """Return a model on replicas of the CPU; builder functions may be given."""
    reset_optimizer_instance_count()
    model = model_helper.ModelHelper(name="replicas")
    given = {
        "input_builder_fun": lambda model: None,
        "forward_pass_builder_fun": add_layers,
        "optimizer_builder_fun": add_sgd,
        "cpu_device": True,
        **arguments,
    }
    data_parallel_model.Parallelize(model, devices=devices, **given)
    return model


def build_bmuf(devices: Sequence[int], **arguments: Any) -> Any:
    """Return a model that trains blockwise on replicas of the CPU."""
    reset_optimizer_instance_count()
    model = model_helper.ModelHelper(name="blocks")
    given = {
        "input_builder_fun": lambda model: None,
        "forward_pass_builder_fun": add_layers,
        "param_update_builder_fun": add_plain_sgd,
        "cpu_device": True,
        **arguments,
    }
    data_parallel_model.Parallelize_BMUF(model, devices=devices, **given)
    return model


def add_plain_sgd(model: Any) -> None:
    """Updates of one device by its own gradients."""
    rate = model.net.LearningRate([brew.iter(model, "iter")], "lr", base_lr=-0.5, policy="fixed")
    one = model.param_init_net.ConstantFill([], "ONE", shape=[1], value=1.0)
    for param in model.GetParams():
        model.net.WeightedSum([param, one, model.param_to_grad[param], rate], param)


def batch(step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of an iteration."""
    drawn = np.random.RandomState(step)
    return drawn.randn(size, FEATURES).astype(np.float32), drawn.randint(0, CLASSES, size).astype(
        np.int32
    )


def feed(model: Any, data: np.ndarray, labels: np.ndarray) -> None:
    """Give each device an equal part of a batch."""
    count = len(model._devices)
    parts = zip(np.split(data, count), np.split(labels, count), strict=True)
    for device, (x, y) in zip(model._devices, parts, strict=True):
        with core.DeviceScope(core.DeviceOption(model._device_type, device)):
            workspace.FeedBlob(f"{model._device_prefix}_{device}/data", x)
            workspace.FeedBlob(f"{model._device_prefix}_{device}/label", y)


def start(model: Any, seed: int = 7) -> None:
    """Fill the parameters with the same values in any run, and create the nets; the first batch
    must be fed.

    A GPU draws other values than the CPU.
    """
    for op in model.param_init_net.Proto().op:
        if op.type == "XavierFill":
            op.device_option.random_seed = seed + sum(map(ord, op.output[0].partition("/")[2]))
    data_parallel_model.RunInitNet(model)


def first_params() -> dict[str, np.ndarray]:
    """Return the values that the CPU draws at the start."""
    workspace.ResetWorkspace()
    model = build([0])
    feed(model, *batch(0, 1))
    start(model)
    return params(model)


def train(
    model: Any, iterations: int, size: int, first: Mapping[str, np.ndarray] | None = None
) -> None:
    """Train from the start, from the values `first` if they are given."""
    feed(model, *batch(0, size))
    start(model)
    for device in model._devices:
        with core.DeviceScope(core.DeviceOption(model._device_type, device)):
            for name, value in (first or {}).items():
                workspace.FeedBlob(f"{model._device_prefix}_{device}/{name}", value)
    for step in range(iterations):
        feed(model, *batch(step, size))
        data_parallel_model.RunNet(model, 1)


def run(model: Any, iterations: int) -> None:
    """Run a model."""
    data_parallel_model.RunNet(model, iterations)


def params(model: Any, device: int | None = None) -> dict[str, np.ndarray]:
    """Return the parameters of a device, by default the first, without its scope."""
    prefix = f"{model._device_prefix}_{model._devices[0] if device is None else device}/"
    return {
        str(param).removeprefix(prefix): workspace.FetchBlob(str(param))
        for param in model.GetParams(prefix)
    }
