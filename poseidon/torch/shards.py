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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from poseidon.base.durable import replacing
from poseidon.engine.leaf import Found, Leaf, Scope
from poseidon.engine.packed import mapped
from poseidon.engine.this_process import current_context
from poseidon.errors import SnapshotError, UsageError, counted, described
from poseidon.exchange.base import Trained, is_sharded, like_shard, local_of
from poseidon.exchange.membership import Membership
from poseidon.exchange.module_hooks import leave_out_of_graphs

PART = "part of a worker"
"""The only key of a mapping that stands for a divided tensor, and has a worker's part of it."""
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
    member, kind = context.member, device or context.worker.device.type
    if not dist.is_initialized():
        raise UsageError(
            "host_mesh() needs the process group of a job; use `poseidon run SCRIPT`, and under "
            "--ddp call init_process_group() first"
        )
    _check_hosts(member)
    shape = member.host_count, member.local_workers
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
    virtual, workers = member.virtual_workers, member.local_workers
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


def bring_shards(rest: Mapping[str, Tensor], member: Membership) -> None:
    """Set shards that are not exchanged to the first host's. All workers call it together."""
    if member.host_count == 1 or not rest:
        return
    seats = [
        range(local, member.network.size, member.local_workers) for local in range(member.planes)
    ]
    groups = [dist.new_group(list(seat)) for seat in seats]
    for tensor in rest.values():
        dist.broadcast(local_of(tensor).detach(), member.plane_ranks[0], groups[member.local_rank])


def whole(value: Any, *, keeps: bool) -> Any:
    """Return a value of dicts, lists, tuples and tensors with whole tensors on the CPU. All workers
    of a host call it together.

    Args:
        keeps: whether this worker needs it; otherwise the tensors are empty.
    """

    def gathered(tensor: Any) -> Tensor:
        if is_sharded(tensor):
            with torch.no_grad():
                tensor = tensor.full_tensor()
        return tensor.detach().cpu().clone() if keeps else torch.empty(0)

    return mapped(value, gathered)


def parts(value: Any) -> Any:
    """Return a value of dicts, lists, tuples and tensors on the CPU, with this worker's parts of
    those that are divided.
    """

    def part(tensor: Tensor) -> object:
        own = local_of(tensor).detach().cpu().clone()
        return {PART: own} if is_sharded(tensor) else own

    return mapped(value, part)


def parts_by_name(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name as this worker's parts."""
    return {name: {PART: value} for name, value in named.items()}


def leaf_of_parts(
    leaf: Leaf,
    gather: Callable[[Any, bool], Any],
    divide: Callable[[Any], Any],
    member: Membership,
    mark: Callable[[Any], Any] = parts_by_name,
) -> Leaf:
    """Return a leaf that has whole tensors of this worker's parts. What belongs to a virtual worker
    of its own is a virtual host's, and is at the first of its virtual workers.

    Args:
        leaf: of parts. It takes the values of this worker's virtual workers, in place of others too.
        gather: returns a value of whole tensors; all workers of a host call it together. The flag
            says whether this worker needs it.
        divide: returns the parts of a value of whole tensors, or of what `mark` returns.
        mark: returns a value of this worker as one of parts.
    """
    workers, is_first = member.local_workers, member.local_rank == 0

    def read() -> Any:
        own = leaf.read()
        if leaf.scope is not Scope.VIRTUAL:
            return gather(own, member.network.rank == 0)
        found = [gather(one, is_first) for one in own]
        return found if is_first else [None] * len(found)

    def marked() -> Any:
        own = leaf.read()
        return list(map(mark, own)) if leaf.scope is Scope.VIRTUAL else mark(own)

    def of_host(found: Found, number: int) -> Any:
        before = found.each[: number - number % workers + 1]
        return divide(next(value for value in reversed(before) if value is not None))

    def write(found: Found) -> None:
        mine = {number: of_host(found, number) for number in found.own} if found.each else {}
        each = [mine.get(number, mine[found.own[0]]) for number in range(len(found.each))]
        shared = None if found.shared is None else divide(found.shared)
        leaf.write(replace(found, each=each, shared=shared))

    def resize(found: Found) -> Any:
        return leaf.resize(replace(found, each=[one for one in found.each if one is not None]))

    collect = (lambda keeps, _: gather(leaf.read(), keeps)) if leaf.scope is Scope.SHARED else None
    return replace(leaf, read=read, collect=collect, parts=marked, write=write, resize=resize)


def gathered(
    parts: Mapping[str, Any],
    like: Mapping[str, Tensor],
    missing: Callable[[str, Tensor], Any],
    *,
    keeps: bool,
) -> dict[str, Any]:
    """Return parts by name as whole tensors. All workers of a host call it together.

    Args:
        parts: of this worker: tensors, or lists of them; empty: no worker has any, or this one has
            no rows of those that have.
        like: divided tensors by the same names, of all workers of a host.
        missing: returns what this worker has of a tensor without a part here, from the name and a
            tensor without elements.
        keeps: whether this worker needs them.
    """
    found: dict[str, Any] = {}
    some = any(sum_over_host(bool(parts), tensor) for tensor in [*like.values()][:1])
    for name, tensor in like.items() if some else ():
        own = parts.get(name)
        if own is None:
            own = missing(name, torch.empty_like(local_of(tensor), dtype=torch.float32))
        sharded = mapped(own, lambda part: like_shard(part.to(tensor.device), tensor))  # noqa: B023
        found[name] = whole(sharded, keeps=keeps)
    return found


def divided_by_name(found: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return this worker's parts of whole tensors by name, or of `parts_by_name`."""
    return {
        name: value[PART]
        if isinstance(value, Mapping)
        else mapped(value, lambda one: part_of(one, like[name]).contiguous())  # noqa: B023
        for name, value in found.items()
        if name in like
    }


def sum_over_host(value: float, sharded: Tensor) -> float:
    """Return the sum of the values of all workers that have parts of a tensor. All call it
    together.
    """
    of: Any = sharded
    total = torch.tensor(value, dtype=torch.float64, device="cpu")
    dist.all_reduce(total, group=of.device_mesh.get_group())
    return float(total)


def part_of(value: Any, sharded: Tensor) -> Tensor:
    """Return this worker's part of a whole tensor, divided as another one is, or the part that
    stands for it.
    """
    if isinstance(value, Mapping):
        own: Tensor = value[PART]
        return own
    whole: Tensor = value
    if not is_sharded(sharded):
        return whole
    of: Any = sharded
    dimension = of.placements[0].dim
    each = -(-whole.shape[dimension] // of.device_mesh.size())
    start = min(each * of.device_mesh.get_local_rank(), whole.shape[dimension])
    rows = min(each, whole.shape[dimension] - start)
    return whole.narrow(dimension, start, rows)


def divided(value: Any, like: Any) -> Any:
    """Return a value of dicts, lists, tuples and whole tensors, with the tensors divided as those
    of another one are.

    Raises:
        ValueError: it has this worker's part of a tensor, and the other one no divided tensor there.
    """
    if isinstance(value, Mapping) and PART in value:
        if not is_sharded(like):
            raise ValueError("it has divided tensors, and the object has none in their places yet")
        return like_shard(part_of(value, like).to(like.device, copy=True), like)
    if isinstance(value, Tensor) and isinstance(like, Tensor) and value.shape == like.shape:
        return like_shard(part_of(value, like).to(like.device, copy=True), like)
    if isinstance(value, Mapping) and isinstance(like, Mapping):
        return {key: divided(part, like.get(key)) for key, part in value.items()}
    if isinstance(value, list | tuple) and isinstance(like, list | tuple):
        parts = [divided(part, other) for part, other in zip(value, like, strict=True)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def of_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state of whole tensors for an optimizer of divided parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    like = {
        number: dict.fromkeys(state["state"].get(number, {}), parameter)
        for number, parameter in enumerate(parameters)
    }
    return {**state, "state": divided(state["state"], like)}


def consolidate(parts: Path, output: Path) -> int:
    """Write one file of a checkpoint of torch.distributed.checkpoint, and return the number of its
    tensors. The file is for `torch.load`.

    Raises:
        SnapshotError: the folder has no such checkpoint, or the file cannot be written; an earlier
            one is unchanged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    if not (parts / ".metadata").is_file():
        raise SnapshotError(
            f"{parts} has no .metadata; expected a folder of torch.distributed.checkpoint, whose "
            "save() has ended"
        )
    state: dict[str, Any] = {}
    try:
        _load_state_dict(
            state,
            storage_reader=FileSystemReader(parts),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    except (
        Exception,
        CheckpointException,
    ) as error:  # whatever pickle, torch and the file system raise
        raise SnapshotError(f"{parts} is damaged: {described(error)}") from error
    found = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal found
        found += 1
        return tensor

    mapped(state, count)
    try:
        with replacing(output) as file:
            torch.save(state, file)
    except OSError as error:
        raise SnapshotError(f"cannot write {output}: {error.strerror}") from error
    return found
