"""Counters, accuracy and weight decay."""

from __future__ import annotations

import logging
from typing import Any

from poseidon.caffe2 import core, scope
from poseidon.caffe2.proto import DEVICE_NUMBERS

log = logging.getLogger("caffe2")


def iter(model: Any, blob_out: Any, **kwargs: Any) -> Any:  # noqa: A001 (Caffe2's name)
    """Add `Iter`: a counter on the CPU that starts at 0 and counts each run of the net."""
    with core.DeviceScope(core.DeviceOption(DEVICE_NUMBERS["CPU"], 0)):
        model.param_init_net.ConstantFill(
            [], blob_out, shape=[1], value=0, dtype=core.DataType.INT64, **kwargs
        )
    return model.net.Iter(blob_out, blob_out, **kwargs)


def accuracy(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> None:
    """Add `Accuracy` of predictions and labels.

    Args:
        blob_in: the two blobs.
        kwargs: `top_k`: how many of the best classes count, 1 by default. Only a model on a GPU
            takes it, whose `Accuracy` then runs on the CPU: Caffe2 leaves it out elsewhere, and a
            warning tells it.
    """
    device = kwargs.pop("device_option", scope.CurrentDeviceScope())
    several = kwargs.get("top_k", 1) > 1
    if several and device is not None and device.device_type != DEVICE_NUMBERS["CPU"]:
        host = core.DeviceOption(DEVICE_NUMBERS["CPU"], 0)
        blob_in = [model.net.CopyGPUToCPU(blob, blob + "_host") for blob in blob_in]
        model.net.Accuracy(blob_in, blob_out, device_option=host, **kwargs)
        return
    if several:
        log.warning(
            "brew.accuracy leaves top_k=%d out on the CPU, as Caffe2 does: call "
            "model.net.Accuracy with top_k",
            kwargs["top_k"],
        )
    model.net.Accuracy(blob_in, blob_out)


def add_weight_decay(model: Any, weight_decay: float) -> None:
    """Add the decay to the gradients of the weights of the current scope; none when it is not
    above 0.

    Raises:
        RuntimeError: a weight has no gradient.
    """
    if weight_decay <= 0.0:
        return
    decay = model.param_init_net.ConstantFill([], "wd", shape=[1], value=weight_decay)
    one = model.param_init_net.ConstantFill([], "ONE", shape=[1], value=1.0)
    for param in model.GetWeights():
        grad = model.param_to_grad.get(param)
        if grad is None:
            raise RuntimeError(
                f"the weight {param} has no gradient: call AddGradientOperators before"
            )
        model.net.WeightedSum([grad, one, param, decay], grad)
