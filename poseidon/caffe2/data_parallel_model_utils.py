"""A part of a data-parallel model's layers on other devices: simple model parallelism.

activations = GetActivationBlobs(model)  # after data_parallel_model.Parallelize
ShiftActivationDevices(model, activations[len(activations) // 2:], {0: 2, 1: 3})
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.data_parallel_model import stripBlobName
from poseidon.caffe2.data_parallel_model.replicas import scope_of


def GetActivationBlobs(model: Any) -> list[str]:
    """Return the activations of a replica, without its scope, in the order of the net: blobs that
    operators read, and whose gradients they read.
    """
    prefix = scope_of(model, model._devices[0])
    read = {name for op in model.net.Proto().op for name in op.input}
    parameters = set(map(str, model.GetParams("")))
    made = dict.fromkeys(name for op in model.net.Proto().op for name in op.output)
    return [
        stripBlobName(name)
        for name in made
        if name.startswith(prefix)
        and not name.endswith("_grad")
        and name not in parameters
        and {name, f"{name}_grad"} <= read
    ]


def ShiftActivationDevices(
    model: Any, activations: Collection[str], shifts: Mapping[int, int]
) -> None:
    """Move operators, gradients and parameters to other devices, with copies where needed.

    Args:
        model: a data-parallel model, before its nets are created.
        activations: some of `GetActivationBlobs`.
        shifts: the new device of each old one.

    Raises:
        ValueError: a device is both an old and a new one.
    """
    both = set(shifts) & set(shifts.values())
    if both:
        raise ValueError(f"the device {min(both)} is both an old and a new one")
    every = set(GetActivationBlobs(model))
    for old, new in shifts.items():
        _shift(model, every, set(activations), old, new)
    model.param_init_net, devices = core.InjectCrossDeviceCopies(model.param_init_net)
    model.net, _ = core.InjectCrossDeviceCopies(model.net, devices)


def _shift(model: Any, every: set[str], moved: set[str], old: int, new: int) -> None:
    """Assign operators of a replica: by their last activation, else the first known blob."""
    prefix = scope_of(model, old)
    activations = {f"{prefix}{name}" for name in every}
    device = {f"{prefix}{name}": new if name in moved else old for name in every}
    for op in model.net.Proto().op:
        if op.device_option.device_id != old or not op.HasField("device_option"):
            continue
        blobs = [*op.input, *op.output]
        known = [name for name in blobs if name in device]
        deciding = [name for name in known if name in activations][-1:] or known[:1]
        chosen = device[deciding[0]] if deciding else old
        for name in blobs:
            if name.startswith(prefix):
                device.setdefault(name, chosen)
        op.device_option.device_id = chosen
    for op in model.param_init_net.Proto().op:
        if op.output[0] in device:
            op.device_option.device_id = device[op.output[0]]
