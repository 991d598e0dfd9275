"""Helpers around the layers: readers, counters, accuracy, weight decay, conditions and loops."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from poseidon.caffe2 import core, scope
from poseidon.caffe2.control_ops_util import add_if_op, add_while_op
from poseidon.caffe2.proto import DEVICE_NUMBERS


def image_input(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    order: str = "NCHW",
    use_gpu_transform: bool = False,
    **kwargs: Any,
) -> Any:
    """Add `ImageInput`, and for NCHW on the CPU the transposition of its images.

    Args:
        blob_in: the reader.
        blob_out: the names of images and labels (and further outputs).
        kwargs: the arguments of the operator; `is_test` is 0 by default.

    Returns:
        the references to the outputs.
    """
    kwargs.setdefault("is_test", 0)
    if order != "NCHW":
        return model.net.ImageInput(blob_in, blob_out, **kwargs)
    if use_gpu_transform:
        return model.net.ImageInput(blob_in, blob_out, use_gpu_transform=1, **kwargs)
    outputs = model.net.ImageInput(blob_in, [blob_out[0] + "_nhwc", *blob_out[1:]], **kwargs)
    return (model.net.NHWC2NCHW(outputs[0], blob_out[0]), *outputs[1:])


def db_input(model: Any, blobs_out: Any, batch_size: int, db: str, db_type: str) -> Any:
    """Add a reader of a database of TensorProtos; return the references to its outputs."""
    reader = model.param_init_net.CreateDB([], "dbreader_" + db, db=db, db_type=db_type)
    return model.net.TensorProtosDBInput(reader, blobs_out, batch_size=batch_size)


def cond(
    model: Any,
    cond_blob: Any,
    external_blobs: Iterable[Any],
    then_model: Any,
    else_model: Any = None,
) -> None:
    """Run one of two models.

    Args:
        model: the model that gets the operator.
        cond_blob: one boolean.
        external_blobs: the blobs of `model` that the others read and write.
        then_model, else_model: what runs where it is true, and where it is false.
    """
    blob = _reference(cond_blob)
    add_if_op(model.net, blob, external_blobs, then_model.net, else_model and else_model.net)


def loop(
    model: Any,
    cond_blob: Any,
    external_blobs: Iterable[Any],
    loop_model: Any,
    cond_model: Any = None,
) -> None:
    """Run a model again and again.

    Args:
        model: the model that gets the operator.
        cond_blob: one boolean; the loop ends where it is false.
        external_blobs: the blobs of `model` that the others read and write.
        loop_model: what runs in each iteration.
        cond_model: what sets the boolean, before each iteration.
    """
    blob = _reference(cond_blob)
    add_while_op(model.net, blob, external_blobs, loop_model.net, cond_model and cond_model.net)


def _reference(blob: Any) -> Any:
    return core.BlobReference(blob) if isinstance(blob, str) else blob


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
    """Add the decay to the gradients of the current scope's weights; none unless above 0.

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
            raise RuntimeError(f"the weight {param} has no gradient: call AddGradientOperators")
        model.net.WeightedSum([grad, one, param, decay], grad)
