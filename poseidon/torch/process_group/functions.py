"""torch.distributed's functions in the processes of a job, where the process group "poseidon" takes
the place of gloo and NCCL.

Law: a group of the job never connects by torch's own means: those do not know the job's addresses,
are not encrypted, and wait where no signal ends the wait. Its functions are replaced while a script
runs, because published scripts name gloo or NCCL: torch takes a new backend only under a new name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.distributed.rpc
from torch.distributed.algorithms.join import Join

from poseidon.errors import UsageError, counted
from poseidon.torch.process_group.backend import NAME, PoseidonGroup, initialize
from poseidon.torch.process_group.mesh import Mesh

dist: Any = torch.distributed

SHARDED = (
    "a DeviceMesh (FSDP2, tensor parallelism) divides the model among the workers, and --ddp is for "
    "scripts in which each worker holds the whole model; expected DistributedDataParallel, or "
    "torchrun"
)

HAS_GROUP = (
    "the script calls init_process_group(), and the workers of `poseidon run` have a process group "
    "already; expected `poseidon run --ddp` for a script of DistributedDataParallel, or no such call"
)

CALLS_OTHERS = (
    "torch.distributed.rpc connects the workers by itself and runs what it receives; expected "
    "collectives, send() and recv() of torch.distributed, or torchrun"
)

DIVIDES = ("torch.distributed.fsdp", "torch.distributed.tensor")
"""Modules of torch that divide a model by a DeviceMesh."""


@contextmanager
def groups_of_job() -> Iterator[None]:
    """Let all groups that are made inside the block be of the job, whatever backend they name, and
    refuse what would leave it.
    """
    c10d = dist.distributed_c10d
    new_group = c10d._new_group_with_tag

    def new_poseidon_group(*arguments: Any, **named: Any) -> Any:
        given = signature(new_group).bind(*arguments, **named).arguments
        backend = given.pop("backend", None) or None
        _check_backend(backend)
        if not isinstance(dist.group.WORLD, PoseidonGroup):  # outside of the job: the script's own
            return new_group(*arguments, **named)
        made = new_group(**given, backend=NAME)
        if isinstance(made, PoseidonGroup):
            _name_backend(made, backend or dist.get_backend())
        return made

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, PoseidonGroup):
            barrier(group, timeout, wait_all_ranks)
            return
        group.monitored_barrier(timeout, wait_all_ranks)

    def notify_join_context(joinable: Any) -> Any:
        # torch's reducer uses it later, and does not keep it alive
        notices[joinable] = notify(joinable)
        return notices[joinable]

    barrier = dist.monitored_barrier
    notify = Join.notify_join_context
    notices: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    mesh_class = torch.distributed.device_mesh.DeviceMesh
    with ExitStack() as undo:
        undo.enter_context(replaced(c10d, "_new_group_with_tag", new_poseidon_group))
        for owner in (dist, c10d):
            undo.enter_context(replaced(owner, "monitored_barrier", monitored_barrier))
        undo.enter_context(replaced(Join, "notify_join_context", notify_join_context))
        undo.enter_context(replaced(torch.distributed.rpc, "init_rpc", refusal(CALLS_OTHERS)))
        for name in ("__init__", "get_group", "get_coordinate"):
            method = _of_whole_models(getattr(mesh_class, name))
            undo.enter_context(replaced(mesh_class, name, method))
        yield


def make_default_group(mesh: Mesh) -> Callable[..., None]:
    """Return a function that stands for `init_process_group` in a script which calls it."""

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *_: Any,
        **__: Any,
    ) -> None:
        if world_size not in (-1, mesh.size) or rank not in (-1, mesh.rank):
            raise UsageError(
                f"init_process_group(world_size={world_size}, rank={rank}) in worker {mesh.rank} of "
                f"a job of {counted(mesh.size, 'worker')}; expected the numbers of the job, which "
                "are in WORLD_SIZE and RANK, or none"
            )
        _check_backend(backend)
        initialize(mesh, **({} if timeout is None else {"timeout": timeout}))
        if backend is not None:
            _name_backend(dist.group.WORLD, backend)

    return init_process_group


def _check_backend(backend: str | None) -> None:
    """Refuse a backend that torch does not know.

    Args:
        backend: such as `gloo`, or `cpu:gloo,cuda:nccl`; None: the script names none.

    Raises:
        ValueError: it names an unknown one.
    """
    known = {*dist.Backend.backend_list, NAME}
    for part in (backend or "").lower().split(","):
        name = part.rpartition(":")[2]
        if name and name not in known:
            raise ValueError(f"unknown backend '{backend}'; known: {', '.join(sorted(known))}")


def _name_backend(group: Any, backend: str) -> None:
    """Let a group say the backend that the script has named: scripts decide by it, such as where
    their tensors are.
    """
    world = dist.distributed_c10d._world
    name = dist.Backend(backend)
    _, store = world.pg_map[group]
    world.pg_map[group] = (name, store)
    world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(name))


def _of_whole_models(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of DeviceMesh that refuses meshes which divide a model: with workers in two
    dimensions, or for FSDP2 and tensor parallelism.
    """

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(DIVIDES) or _asked_by_fsdp(caller):
            raise UsageError(SHARDED)
        result = method(self, *arguments, **named)
        if sum(size > 1 for size in self.mesh.shape) > 1:
            raise UsageError(SHARDED)
        return result

    return call


def _asked_by_fsdp(caller: str) -> bool:
    """Return whether `init_device_mesh` was called by a module that divides models."""
    frame = sys._getframe(2)
    return (
        caller == "torch.distributed.device_mesh"
        and frame.f_back is not None
        and (frame.f_back.f_globals.get("__name__", "").startswith(DIVIDES))
    )


def refusal(sentence: str) -> Callable[..., None]:
    """Return a function that raises a UsageError, whatever its arguments are."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(sentence)

    return refuse


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
