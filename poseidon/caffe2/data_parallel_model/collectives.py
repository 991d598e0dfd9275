"""The operators that sum gradients and copy parameters between the replicas and between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.data_parallel_model.replicas import (
    Group,
    device_type_of,
    group_of,
    is_on_gpu,
    log,
    option_of,
    scope_of,
)

TIMEOUT_S = 30
"""Longest time that a collective operation waits, as in Caffe2."""
Rendezvous = dict[str, Any]
"""See `Parallelize`."""
Concatenate = Callable[[list[Any], str], Any]
"""Adds the operator that puts blobs one after the other; the second argument begins the names of
what it makes, which it returns.
"""


def between_hosts(rendezvous: Rendezvous | None) -> bool:
    """Return whether there is more than one shard."""
    return rendezvous is not None and rendezvous["num_shards"] > 1


# Between the replicas of one host.


def copy_to_others(model: Any, net: Any, name: str, use_nccl: bool = False) -> None:
    """Copy a blob of the first device to all others."""
    group = group_of(model, name)
    first, *others = model._devices
    if use_nccl and is_on_gpu(model, name):
        with core.DeviceScope(option_of(model, first)):
            net.NCCLBroadcast(list(group.values()), list(group.values()), root=0)
        return
    for device in others:
        kind = device_type_of(model, name)
        target = core.DeviceOption(kind, device if core.IsGPUDeviceType(kind) else 0)
        with core.DeviceScope(target):
            net.Copy(group[first], group[device])


def sum_over_devices(model: Any, net: Any, names: Sequence[str], use_nccl: bool) -> None:
    """Sum blobs over this host's devices, in the order of `names`; all devices get the sums."""
    if len(model._devices) == 1:
        return
    previous = None  # the NCCL operators of all devices run in one order
    joined: set[str] = set()

    def concatenate(pieces: list[Any], prefix: str) -> Any:
        names = [f"{prefix}_concat", f"{prefix}_splitinfo"]
        return net.Concat(pieces, names, axis=0)[0]

    for name in names:
        group = group_of(model, name)
        if len(group) == 1:
            continue
        assert len(group) == len(model._devices), f"{name} is not on all of {model._devices}"
        blobs = list(group.values())
        if isinstance(blobs[0], core.GradientSlice):
            _join_slices(model, net, name, group, joined, concatenate)
        elif not is_on_gpu(model, name):
            kind = device_type_of(model, name)
            with core.DeviceScope(core.DeviceOption(kind)):
                net.Sum(blobs, [blobs[0]])
            if not model._shared_model:
                copy_to_others(model, net, name)
        elif use_nccl:
            with core.DeviceScope(option_of(model, model._devices[0])):
                net.NCCLAllreduce(blobs, blobs, control_input=previous)
            previous = blobs[0]
        else:
            _sum_as_tree(model, net, name, blobs)
            copy_to_others(model, net, name)


def _tree(count: int) -> list[tuple[int, ...]]:
    """Return which blobs are summed in turn into the first: in pairs for 4, 8, 16, else all."""
    if count not in (4, 8, 16):
        return [tuple(range(count))]
    steps = [1 << level for level in range(count.bit_length() - 1)]
    return [(first, first + step) for step in steps for first in range(0, count, 2 * step)]


def _sum_as_tree(model: Any, net: Any, name: str, blobs: list[Any]) -> None:
    reachable = workspace.GetGpuPeerAccessPattern()
    for members in _tree(len(blobs)):
        own = model._devices[members[0]]
        parts = []
        with core.DeviceScope(option_of(model, own)):
            for member in members:
                other, part = model._devices[member], blobs[member]
                if other != own and not _can_read(reachable, own, other):
                    part = net.Copy(part, f"{scope_of(model, own)}{name}_gpu{other}_copy")
                parts.append(part)
            net.Sum(parts, [parts[0]], name="dpm")


def _can_read(reachable: NDArray[np.bool_], own: int, other: int) -> bool:
    """Return whether one GPU can read another's memory; True if the machine lacks one of them."""
    return max(own, other) >= len(reachable) or bool(reachable[own, other])


def _join_slices(
    model: Any, net: Any, name: str, group: Group, joined: set[str], concatenate: Concatenate
) -> None:
    """Concatenate the indices and values of sparse gradients, for all devices.

    Gradients that were gathered with the same indices have these joined once.

    Args:
        model: the model.
        net: the net that joins them.
        name: of the group.
        group: the gradients.
        joined: the indices that were joined before; this group's indices are added.
        concatenate: adds the operator that makes a blob of the parts of all devices.
    """
    prefix = f"{scope_of(model, model._devices[0])}{name}"
    parts = [("indices", "index"), ("values", "val")]
    if any(str(piece.indices) in joined for piece in group.values()):
        del parts[0]
    for field, label in parts:
        with core.DeviceScope(option_of(model, model._devices[0])):
            pieces = [getattr(piece, field) for piece in group.values()]
            whole = concatenate(pieces, f"{prefix}_{label}")
        for device, piece in group.items():
            with core.DeviceScope(option_of(model, device)):
                net.Copy(whole, getattr(piece, field))
    joined.update(str(piece.indices) for piece in group.values())


# Between hosts.


class CollectivesConcurrencyControl:
    """Spreads collectives over a few common worlds; a world runs them in one order.

    Attributes:
        common_worlds: their blobs.
        counter: the number of collectives so far.
    """

    def __init__(
        self, name: str, max_concurrent_context: int, param_init_net: Any, rendezvous: Rendezvous
    ) -> None:
        """Prepare.

        Args:
            name: what the names of the worlds begin with.
            max_concurrent_context: the most worlds; NCCL has one, as its operations need one order.
            param_init_net: the net that makes them.
            rendezvous: see `Parallelize`.
        """
        self.name = name
        nccl = rendezvous["engine"] == "NCCL"
        self.max_concurrent_context = 1 if nccl else max_concurrent_context
        self.param_init_net = param_init_net
        self.rendezvous = rendezvous
        self.counter = 0
        self.common_worlds: list[Any] = []
        self.control_inputs: list[Any] = []

    def get_control_and_context(self, control_output_blob: Any) -> tuple[Any, Any]:
        """Return the next collective's world, and the blobs of the world's last one to wait for.

        Args:
            control_output_blob: the blobs that the collective makes.
        """
        slot = self.counter % self.max_concurrent_context
        self.counter += 1
        if slot == len(self.common_worlds):
            world = common_world(self.param_init_net, f"{self.name}_{slot}_cw", self.rendezvous)
            self.common_worlds.append(world)
            self.control_inputs.append(control_output_blob)
            return world, None
        before, self.control_inputs[slot] = self.control_inputs[slot], control_output_blob
        return self.common_worlds[slot], before


def common_world(
    net: Any, blob: str, rendezvous: Rendezvous, timeout_sec: float | None = None
) -> Any:
    """Add the operator that makes a common world, or clones one with the same time limit.

    Args:
        net: an init net.
        blob: the name of the world.
        rendezvous: see `Parallelize`.
        timeout_sec: longest time that its collectives wait; 30 s by default.
    """
    timeout_ms = int((TIMEOUT_S if timeout_sec is None else timeout_sec) * 1000)
    name, engine = f"{blob}_op", rendezvous["engine"]
    for op in net.Proto().op:
        if op.type == "CreateCommonWorld" and any(
            argument.name == "timeout_ms" and argument.i == timeout_ms for argument in op.arg
        ):
            return net.CloneCommonWorld([op.output[0]], blob, name=name, engine=engine)
    extra = {
        key: rendezvous[key]
        for key in ("transport", "interface", "mpi_rendezvous")
        if key in rendezvous
    }
    return net.CreateCommonWorld(
        rendezvous["kv_handler"] or [],
        blob,
        name=name,
        size=rendezvous["num_shards"],
        rank=rendezvous["shard_id"],
        engine=engine,
        timeout_ms=timeout_ms,
        **extra,
    )


def all_reduce(
    model: Any, net: Any, names: Sequence[str], use_nccl: bool, max_concurrent_distributed_ops: int
) -> None:
    """Sum blobs over all devices of all shards, in the order of `names`."""
    rendezvous = model._rendezvous
    if not between_hosts(rendezvous):
        sum_over_devices(model, net, names, use_nccl)
        return
    assert model.net.Proto().num_workers > 1, "Please specify more than 1 worker"
    context = CollectivesConcurrencyControl(
        "allreduce", max_concurrent_distributed_ops, model.param_init_net, rendezvous
    )
    direct = rendezvous.get("transport") == "ibverbs"
    joined: set[str] = set()

    def gather(pieces: list[Any], prefix: str) -> Any:
        whole = core.BlobReference(f"{prefix}_gathered")
        world, before = context.get_control_and_context(whole)
        net.Allgather([world, *pieces], whole, engine=rendezvous["engine"], control_input=before)
        return whole

    for name in names:
        group = group_of(model, name)
        blobs = list(group.values())
        if isinstance(blobs[0], core.GradientSlice):
            _join_slices(model, net, name, group, joined, gather)
            continue
        with core.DeviceScope(option_of(model, model._devices[0])):
            world, before = context.get_control_and_context(blobs[0])
            net.Allreduce(
                [world, *blobs],
                blobs,
                name=name,
                engine=rendezvous["engine"],
                control_input=before,
                gpu_direct=direct,
            )


def sync(
    model: Any,
    init_net: Any,
    net: Any,
    names: Iterable[str],
    max_concurrent_distributed_ops: int = 4,
) -> None:
    """Give blobs of all devices of all shards the values of the first device of shard 0.

    Args:
        model: the model.
        init_net: the net that makes the common worlds.
        net: the net that copies.
        names: of the groups.
        max_concurrent_distributed_ops: the number of common worlds, if the model has none yet.
    """
    rendezvous = model._rendezvous
    if not between_hosts(rendezvous):
        for name in sorted(names):
            copy_to_others(model, net, name)
        return
    if model._broadcast_context is None:
        model._broadcast_context = CollectivesConcurrencyControl(
            "broadcast", max_concurrent_distributed_ops, init_net, rendezvous
        )
    for name in sorted(names):
        group = group_of(model, name)
        shared = model._shared_model and name not in model._computed_param_names
        blobs = [group[model._devices[0]]] if shared else list(group.values())
        kind = device_type_of(model, name)
        device = model._devices[0] if core.IsGPUDeviceType(kind) else 0
        with core.DeviceScope(core.DeviceOption(kind, device)):
            world, before = model._broadcast_context.get_control_and_context(blobs)
            net.Broadcast(
                [world, *blobs], blobs, name=name, engine=rendezvous["engine"], control_input=before
            )


def share_computed_params(model: Any, use_nccl: bool) -> None:
    """Copy what the first device's net computes itself, e.g. running means, to the others."""
    if len(model._devices) > 1:
        for name in model._computed_param_names:
            copy_to_others(model, model.net, name, use_nccl)
    if between_hosts(model._rendezvous) and model._computed_param_names:
        log.info("Running means and variances stay each shard's own")


def AddBlobSync(model: Any, blobs: Sequence[str], net: Any = None) -> None:
    """Give blobs of all devices and shards the value of the first, whenever a net runs.

    Args:
        model: a parallelized model.
        blobs: names without the scope of a device.
        net: the net; by default the model's.
    """
    if not blobs:
        return
    for blob in blobs:
        assert not blob.startswith(model._device_prefix), f"Provide unprefixed blob name: {blob}"
        group_of(model, blob)
    sync(model, model.param_init_net, model.net if net is None else net, set(blobs))


def AddDistributedBlobSync(model: Any, blobs: Sequence[Any]) -> None:
    """Sum blobs over all shards, but not over devices, whenever the model's net runs."""
    if model._rendezvous is None:
        return
    joined = "_".join(str(blob) for blob in blobs)
    world = common_world(model.param_init_net, f"blob_sync_cw_{joined}", model._rendezvous)
    model.net.Allreduce([world, *blobs], list(blobs), engine=model._rendezvous["engine"])
