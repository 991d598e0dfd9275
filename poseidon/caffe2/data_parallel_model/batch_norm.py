"""Batch normalization over all devices of a host: statistics of the joined batch
(`combine_spatial_bn`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import core, utils
from poseidon.caffe2.data_parallel_model.replicas import CPU, option_of, scope_of, stripBlobName

STATISTICS = ("sums", "sumsq")


def combine(model: Any) -> None:
    """Interleave the operators of the replicas, and give each SpatialBN the sums over all devices.

    Raises:
        AssertionError: the replicas have not the same operators.
    """
    operators: list[Any] = []
    for same in _interleaved(model):
        if same[0].type == "SpatialBN":
            operators += _forward(model, same)
        elif same[0].type == "SpatialBNGradient":
            operators += _backward(model, same)
        else:
            operators += same
    proto = model.net.Proto()
    del proto.op[:]
    proto.op.extend(operators)


def _interleaved(model: Any) -> list[list[Any]]:
    """Return for each operator of a replica the same operator of all replicas."""
    own: dict[int, list[Any]] = {device: [] for device in model._devices}
    for op in model.net.Proto().op:
        copied = copy.deepcopy(op)
        own[op.device_option.device_id].append(copied)
    counts = {len(operators) for operators in own.values()}
    assert len(counts) == 1, "Number of ops per device in original net is not uniform"
    rows = [list(row) for row in zip(*own.values(), strict=True)]
    for row in rows:
        kinds = sorted({op.type for op in row})
        assert len(kinds) == 1, f"Type mismatch {' / '.join(kinds)}"
    return rows


def _forward(model: Any, normalizations: Sequence[Any]) -> list[Any]:
    inputs = [op.input[0] for op in normalizations]
    made = [
        core.CreateOperator(
            "ChannelStats",
            name,
            [f"{name}_{kind}" for kind in STATISTICS],
            device_option=_on_gpu(model, device),
        )
        for device, name in zip(model._devices, inputs, strict=True)
    ]
    totals = []
    for kind in STATISTICS:
        operators, total = _total(
            model, [f"{name}_{kind}" for name in inputs], f"{inputs[0]}_{kind}_combined"
        )
        made += operators
        totals.append(total)
    for index, op in enumerate(normalizations):
        op.input.extend(total[index] for total in totals)
        op.arg.extend([utils.MakeArgument("num_batches", len(model._devices))])
    return [*made, *normalizations]


def _backward(model: Any, gradients: Sequence[Any]) -> list[Any]:
    made = [
        core.CreateOperator(
            "ChannelBackpropStats",
            [op.input[0], op.input[3], op.input[4], op.input[2]],
            [op.output[1], op.output[2]],
            device_option=_on_gpu(model, device),
        )
        for device, op in zip(model._devices, gradients, strict=True)
    ]
    for output in (1, 2):
        names = [op.output[output] for op in gradients]
        total = f"{scope_of(model, 0)}{stripBlobName(names[0])}_combined"
        made += _total(model, names, total, back=True)[0]
    for op in gradients:
        op.input.extend([op.output[1], op.output[2]])
        op.arg.extend([utils.MakeArgument("num_batches", len(model._devices))])
    return [*made, *gradients]


def _on_gpu(model: Any, device: int) -> Any:
    """Return the device option of a GPU; operators of the CPU have none."""
    return option_of(model, device) if core.IsGPUDeviceType(model._device_type) else None


def _total(
    model: Any, names: list[str], total: str, back: bool = False
) -> tuple[list[Any], list[str]]:
    """Return operators that sum a blob over all devices, and the name of the sum for each device.

    Args:
        names: of the blob, by device.
        total: the name of the sum.
        back: whether the sum takes the place of the parts.
    """
    create = core.CreateOperator
    if not core.IsGPUDeviceType(model._device_type):
        made = [create("Sum", names, total)]
        made += [create("Copy", total, name) for name in names if back]
        return made, names if back else [total] * len(names)
    options = [option_of(model, device) for device in model._devices]
    cpu = core.DeviceOption(CPU)
    host = [f"cpu_0/{name.replace('/', '_')}_copy" for name in names]
    total = f"cpu_0/{stripBlobName(total)}"
    targets = names if back else [f"{name}_combined" for name in names]
    made = [
        create("CopyGPUToCPU", name, copied, device_option=option)
        for name, copied, option in zip(names, host, options, strict=True)
    ]
    made.append(create("Sum", host, total, device_option=cpu))
    made += [
        create("CopyCPUToGPU", total, target, device_option=option)
        for target, option in zip(targets, options, strict=True)
    ]
    return made, targets
