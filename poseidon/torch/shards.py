"""Modules that `fully_shard` has divided among the workers of a host.

    mesh = poseidon.host_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    group = poseidon.distribute(model, optimizer)

Law: FSDP moves values and gradients within a host, the exchange between hosts. The exchange of a
worker has the worker's shards: it contributes their mean gradients over the host, which FSDP has
reduced, and the workers with one local rank on all hosts have equal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from poseidon.engine.this_process import current_context
from poseidon.errors import UsageError, counted
from poseidon.exchange.base import Trained, is_sharded, local_of
from poseidon.exchange.membership import Membership
from poseidon.exchange.module_hooks import leave_out_of_graphs

EXPECTED = "call fully_shard(module, mesh=poseidon.host_mesh()) before distribute()"
dist: Any = torch.distributed


def host_mesh(device: str | None = None) -> DeviceMesh:
    """Return a mesh of one dimension, `shard`: the workers of this host.

    All workers call it together, before or after their first collective. It is for
    `fully_shard(module, mesh=...)`. Between hosts `distribute` exchanges each worker's shards.

    Args:
        device: the type of the parameters' device, such as `cuda`; None: of this worker's.

    Raises:
        UsageError: hosts have different numbers of workers; or there is no process group, because
            `poseidon run` has not started this process.
    """
    context = current_context()
    member, kind = context.member, device or context.device.type
    if not dist.is_initialized():
        raise UsageError(
            "host_mesh() needs the process group of a job; use `poseidon run SCRIPT`, and under "
            "--ddp call init_process_group() first"
        )
    _check_hosts(member)
    shape = member.seat.host_count, member.seat.local_workers
    both = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    return both["shard"]


def _check_hosts(member: Membership) -> None:
    workers = member.hosts or (1,)
    if len(set(workers)) > 1:
        raise UsageError(
            f"hosts have {min(workers)} to {counted(max(workers), 'worker')}, but a module that is "
            "divided among the workers of a host needs the same number of workers on all hosts"
        )


@dataclass(frozen=True, slots=True)
class Shards:
    """How the parameters of a module are divided among the workers of a host.

    Attributes:
        workers: of a host.
        dimensions: along which each parameter is divided, by name.
        shapes: of each whole parameter, by name.
    """

    workers: int
    dimensions: Mapping[str, int]
    shapes: Mapping[str, torch.Size]

    def shape(self, name: str, local_rank: int) -> tuple[int, ...]:
        """Return the shape of a worker's part of a parameter: rows go to the workers as
        `torch.chunk` divides them.
        """
        shape, dimension = list(self.shapes[name]), self.dimensions[name]
        rows = shape[dimension]
        each = -(-rows // self.workers)
        shape[dimension] = max(0, min(rows - local_rank * each, each))
        return tuple(shape)

    def planes(
        self, names: Sequence[str], trained: Callable[[str, Tensor], Trained]
    ) -> list[list[Trained]]:
        """Return what the workers of each plane exchange: the parts that are not empty.

        Args:
            trained: returns a part as the exchange has it; its tensor has no memory.
        """
        return [
            [
                trained(name, torch.empty(shape, device="meta"))
                for name in names
                if 0 not in (shape := self.shape(name, local_rank))
            ]
            for local_rank in range(self.workers)
        ]


def shards_of(module: nn.Module, member: Membership) -> Shards | None:
    """Return how a module is divided; None: it is not.

    Raises:
        UsageError: it is divided by a different mesh than `host_mesh`, or only in part, or among
            more workers than it has rows.
    """
    named = dict(module.named_parameters())
    if not any(map(is_sharded, named.values())):
        return None
    _check_hosts(member)
    found: dict[str, int] = {}
    for name, parameter in named.items():
        if is_sharded(parameter):
            found[name] = _dimension(name, parameter, member)
        elif parameter.requires_grad:
            raise UsageError(
                f"'{name}' is not divided, and other parameters of the module are; {EXPECTED}, for "
                "the whole module"
            )
    virtual, workers = member.virtual_workers, member.seat.local_workers
    if virtual is not None and virtual.count % workers:
        raise UsageError(
            f"{counted(virtual.count, 'virtual worker')} cannot be divided among hosts of "
            f"{workers} workers, which share a module of fully_shard(); use a multiple of {workers}"
        )
    shards = Shards(workers, found, {name: named[name].shape for name in found})
    trained = [name for name in found if named[name].requires_grad]
    if trained and all(0 in shards.shape(name, workers - 1) for name in trained):
        raise UsageError(
            f"the {workers} workers of a host are more than the rows of every trained parameter; "
            "start fewer workers a host, or leave out fully_shard()"
        )
    return shards


def _dimension(name: str, parameter: Any, member: Membership) -> int:
    """Return the dimension along which a parameter is divided.

    Raises:
        UsageError: it is divided otherwise.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    ranks = mesh.mesh.flatten().tolist()
    if set(ranks) - set(member.host_ranks):
        raise UsageError(
            f"'{name}' is divided among workers {', '.join(map(str, ranks))} of several hosts, so "
            f"its shards would travel in every pass; {EXPECTED}"
        )
    if mesh.ndim != 1 or ranks != list(member.host_ranks) or not placements[0].is_shard():
        raise UsageError(
            f"'{name}' is placed as {placements} on workers {', '.join(map(str, ranks))}; {EXPECTED}"
        )
    dimension: int = placements[0].dim
    return dimension


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters that FSDP gathers together, of the state of a module."""
    several = vars(state).get("_fsdp_param_groups")
    if several is None:  # torch before 2.13
        several = [group for group in [state._fsdp_param_group] if group is not None]
    return list(several)


def _groups_within(module: nn.Module) -> list[Any]:
    divided: list[Any] = [one for one in module.modules() if hasattr(one, "_get_fsdp_state")]
    found = [group for one in divided for group in groups_of(one._get_fsdp_state())]
    return list({id(group): group for group in found}.values())


def views_of_fsdp(module: nn.Module) -> list[Tensor]:
    """Return the tensors by which FSDP has the memory of a module's parts."""
    parameters = [one for group in _groups_within(module) for one in group.fsdp_params]
    views = [one._sharded_param_data for one in parameters]
    return [*views, *(base for view in views if (base := view._base) is not None)]


def wait_for_copy(parameter: Any) -> None:
    """Wait until the gradient of a parameter of FSDP's is in host memory, where
    `CPUOffloadPolicy(pin_memory=True)` copies it. Older versions of torch call hooks before that.
    """
    if copied := getattr(parameter, "grad_offload_event", None):
        copied.synchronize()


def copies_before_hooks(module: nn.Module) -> Callable[[], None]:
    """Let the hooks on parameters that are registered from now on find gradients that FSDP has
    copied to host memory. Return what ends that.
    """
    handles = [
        one.sharded_param.register_post_accumulate_grad_hook(lambda _, one=one: wait_for_copy(one))
        for group in _groups_within(module)
        for one in group.fsdp_params
        if one.sharded_param.requires_grad
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def call_before_gathering(
    module: nn.Module, call: Callable[[Sequence[Tensor]], None]
) -> Callable[[], None]:
    """Call a function with the parameters of each group of a module before FSDP gathers it. Return
    what ends that.
    """
    groups = _groups_within(module)

    def wrap(group: Any) -> None:
        unshard = group.unshard

        def gather(*arguments: Any, **named: Any) -> None:
            call([one.sharded_param for one in group.fsdp_params])
            unshard(*arguments, **named)

        leave_out_of_graphs(gather, "waits of poseidon.distribute for values")
        group.unshard = gather

    def end() -> None:
        for group in groups:
            vars(group).pop("unshard", None)

    for group in groups:
        wrap(group)
    return end


def bring_shards(rest: Sequence[Tensor], member: Membership) -> None:
    """Set shards that are not exchanged to the first host's. All workers call it together."""
    if member.seat.host_count == 1 or not rest:
        return
    seats = [
        range(local, member.network.size, member.seat.local_workers)
        for local in range(member.seats.planes)
    ]
    groups = [dist.new_group(list(seat)) for seat in seats]
    for tensor in rest:
        dist.broadcast(
            local_of(tensor).detach(), member.plane_ranks[0], groups[member.seat.local_rank]
        )


def sum_over_host(value: float, sharded: Tensor) -> float:
    """Return the sum of the values of all workers that have parts of a tensor. All call it
    together.
    """
    of: Any = sharded
    total = torch.tensor(value, dtype=torch.float64, device="cpu")
    dist.all_reduce(total, group=of.device_mesh.get_group())
    return float(total)
