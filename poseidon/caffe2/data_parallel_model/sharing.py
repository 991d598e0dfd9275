"""What the replicas of a model share: memory of gradients, and statistics of batch normalization."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from poseidon.caffe2 import core, memonger, utils, workspace
from poseidon.caffe2.data_parallel_model.replicas import (
    CPU,
    log,
    option_of,
    scope_of,
    stripBlobName,
)

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


def keep_params_of_first(model: Any) -> None:
    """Leave in the model only the parameters of the first device: only these are updated."""
    model.params = model.GetParams(scope_of(model, model._devices[0]))
    kept = set(model.params)
    model.param_to_grad = {p: grad for p, grad in model.param_to_grad.items() if p in kept}
    model.weights = [weight for weight in model.weights if weight in kept]
    model.biases = [bias for bias in model.biases if bias in kept]


def read_params_of_first(model: Any, all_params: Iterable[Any]) -> None:
    """Make all replicas read the first device's parameters, and drop what makes the others."""
    others = {str(param) for param in all_params} - {str(param) for param in model.GetParams()}
    first = scope_of(model, model._devices[0])
    for net in (model.param_init_net, model.net):
        proto = net.Proto()
        kept = []
        for op in proto.op:
            if others.isdisjoint(op.output):
                op.input[:] = [
                    first + stripBlobName(name) if name in others else name for name in op.input
                ]
                kept.append(type(op).FromString(op.SerializeToString()))
        del proto.op[:]
        proto.op.extend(kept)


def share_gradient_blobs(model: Any, losses: Mapping[int, Sequence[Any]]) -> None:
    """Let the gradients of each device share blobs."""
    log.warning("optimize_gradient_memory is deprecated, use OptimizeGradientMemory()")
    for device in model._devices:
        model.net._net = memonger.share_grad_blobs(
            model.net,
            losses[device],
            set(model.param_to_grad.values()),
            scope_of(model, device),
            share_activations=False,
        )


def release_blobs(model: Any, blobs_to_keep: Iterable[str] | None) -> None:
    """Free each blob after its last use.

    Args:
        model: the model.
        blobs_to_keep: names, without the scope of a device, of blobs that stay.
    """
    kept = {scope_of(model, device) + b for device in model._devices for b in blobs_to_keep or ()}
    if model._rendezvous is not None:
        kept.update(str(grad) for grad in model.param_to_grad.values())
    model.net._net = memonger.release_blobs_when_used(model.net.Proto(), kept)


def OptimizeGradientMemory(
    model: Any,
    input_shapes: Mapping[str, Sequence[int]] | None,
    excluded_blobs: Iterable[str],
    recycle_activations: bool,
) -> None:
    """Let the gradients of a device share blobs where one is dead before the other is made.

    Args:
        model: a parallelized model; call it before its net is created.
        input_shapes: the shape of each input, by its name without the scope of a device; with it,
            blobs of like size are shared. Empty where they are unknown, None to leave shapes out of
            account.
        excluded_blobs: names of blobs that are not shared, since the script reads them.
        recycle_activations: whether activations of the forward pass share blobs too.
    """
    shapes = None
    if input_shapes is not None:
        known = {
            scope_of(model, device) + name: shape
            for name, shape in input_shapes.items()
            for device in model._devices
        }
        shapes, _ = workspace.InferShapesAndTypes([model.param_init_net, model.net], known)
    for device in model._devices:
        prefix = scope_of(model, device)
        model.net._net = memonger.share_grad_blobs(
            model.net,
            model._losses_by_gpu[device],
            set(model.param_to_grad.values()),
            prefix,
            dont_share_blobs={prefix + name for name in excluded_blobs},
            share_activations=recycle_activations,
            blob_shapes=shapes,
        )
