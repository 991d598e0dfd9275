"""torch.distributed's functions in the processes of a job, where the process group "poseidon" takes
the place of gloo and NCCL.

Law: a group of the job never connects by torch's own means: those do not know the job's addresses,
are not encrypted, and wait where no signal ends the wait. Its functions are replaced while a script
runs, because published scripts name gloo or NCCL: torch takes a new backend only under a new name.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed
import torch.distributed.rpc
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.distributed_c10d import init_process_group
from torch.nn.parallel import DistributedDataParallel

from poseidon.errors import UsageError, counted
from poseidon.torch.process_group.backend import NAME, PoseidonGroup
from poseidon.torch.process_group.collectives import Collectives
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.process_group.work import Calls

LOGGER = logging.getLogger(__name__)
dist: Any = torch.distributed
Function = TypeVar("Function", bound=Callable[..., Any])
TENSOR_PARALLEL = "torch.distributed.tensor.parallel"
FSDP_MESHES = "torch.distributed.fsdp._fully_shard._fsdp_common"
"""Modules of torch that import the compiler, so that they are left to scripts which use them."""
ACROSS_HOSTS = (
    "tensor parallelism over workers of several hosts sends every activation between hosts; "
    "give parallelize_module() a mesh of the workers of one host, such as "
    'init_device_mesh(device, (hosts, workers), mesh_dim_names=("replicate", "tensor"))["tensor"]'
)

SHARDS_ACROSS_HOSTS = (
    "fully_shard() divides parameters among workers of several hosts, so all parameters travel "
    "between hosts in each forward and each backward pass; with init_device_mesh(device, (hosts, "
    'workers), mesh_dim_names=("replicate", "shard")) only gradients do'
)

HAS_GROUP = (
    "the script calls init_process_group(), but the workers of `poseidon run` have a process "
    "group already; use `poseidon run --ddp` for a script of DistributedDataParallel, or remove "
    "the call"
)

CALLS_OTHERS = (
    "torch.distributed.rpc is not supported, because it makes its own connections and runs what "
    "it receives; use collectives, send() and recv() of torch.distributed, or torchrun"
)

JOINS_SEVERAL = (
    "Join of several DistributedDataParallel modules is not supported, because torch aborts; use "
    "one module, which may contain the others"
)


def register(mesh: Mesh, script: Calls | None = None) -> None:
    """Make the backend "poseidon" known to torch.distributed, with the messages of a job.

    Args:
        script: notes the calls of groups of all workers.
    """

    generation = itertools.count()
    """Of default groups: a script may destroy one and make the next, whose groups have the same
    names.
    """
    current = 0

    def create(options: Any, _: Any = None) -> PoseidonGroup:
        nonlocal current
        ranks = list(options.global_ranks_in_group)
        if not ranks:
            current = next(generation)
            ranks = list(range(mesh.size))
        name, timeout_s = f"{current}.{options.group_id}", options.timeout.total_seconds()
        return PoseidonGroup(Collectives(mesh, name, ranks, timeout_s), script)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    # the recorder of torch 2.15 and later is for groups in C++, and fails on this one
    recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.add(NAME)


def initialize(mesh: Mesh, **arguments: Any) -> None:
    """Make a group of all workers torch.distributed's default group.

    Args:
        arguments: of `init_process_group`, besides its backend, store, rank and size.
    """
    store = mesh.store.new()
    store.set_timeout(arguments.get("timeout", dist.default_pg_timeout))
    init_process_group(NAME, store=store, rank=mesh.rank, world_size=mesh.size, **arguments)
    # without the prefix in C++, which leaves out queues and the list of keys
    dist.distributed_c10d._world.pg_map[dist.group.WORLD] = (dist.Backend(NAME), store)


@contextmanager
def groups_of_job(init_process_group: Callable[..., None] | None = None) -> Iterator[None]:
    """Let all groups that are made inside the block be of the job, whatever backend they name, and
    refuse what would leave it.

    Args:
        init_process_group: stands for torch's function; None: torch's stays.
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

    @standing_for(Join.__init__)
    def join(self: Join, joinables: list[Any], *arguments: Any, **named: Any) -> None:
        if sum(isinstance(one, DistributedDataParallel) for one in joinables) > 1:
            raise UsageError(JOINS_SEVERAL)
        make(self, joinables, *arguments, **named)

    barrier, make = dist.monitored_barrier, Join.__init__
    notify = Join.notify_join_context
    notices: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    with ExitStack() as undo:
        undo.enter_context(replaced(c10d, "_new_group_with_tag", new_poseidon_group))
        for owner in (dist, c10d):
            undo.enter_context(replaced(owner, "monitored_barrier", monitored_barrier))
            if init_process_group is not None:
                undo.enter_context(replaced(owner, "init_process_group", init_process_group))
        undo.enter_context(replaced(Join, "notify_join_context", notify_join_context))
        undo.enter_context(replaced(Join, "__init__", join))
        undo.enter_context(replaced(torch.distributed.rpc, "init_rpc", refusal(CALLS_OTHERS)))

        def keep_within_hosts(api: Any) -> None:
            parallelize = _within_hosts(api.parallelize_module)
            for owner in (api, sys.modules.get(TENSOR_PARALLEL)):
                if hasattr(owner, "parallelize_module"):
                    undo.enter_context(replaced(owner, "parallelize_module", parallelize))

        def note_shards(common: Any) -> None:
            info = common.FSDPMeshInfo
            noting = _noting_shards(info.__post_init__)
            undo.enter_context(replaced(info, "__post_init__", noting))

        actions = {f"{TENSOR_PARALLEL}.api": keep_within_hosts, FSDP_MESHES: note_shards}
        undo.enter_context(after_import(actions))
        yield


def make_default_group(mesh: Mesh) -> Callable[..., None]:
    """Return a function that stands for `init_process_group` in a script which calls it."""

    @standing_for(init_process_group)
    def init_group(
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
                f"init_process_group(world_size={world_size}, rank={rank}) in worker {mesh.rank} "
                f"of a job of {counted(mesh.size, 'worker')}; give the numbers in WORLD_SIZE and "
                "RANK, or none"
            )
        _check_backend(backend)
        initialize(mesh, **({} if timeout is None else {"timeout": timeout}))
        if backend is not None:
            _name_backend(dist.group.WORLD, backend)

    return init_group


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


def _on_one_host(ranks: Sequence[int]) -> bool:
    """Return whether workers of the job, this one among them, are on one host."""
    group = dist.group.WORLD
    return not isinstance(group, PoseidonGroup) or group.mesh.memory.neighbours.issuperset(ranks)


def _within_hosts(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `parallelize_module`, which refuses meshes with workers of several hosts."""

    @standing_for(parallelize)
    def parallelize_module(module: Any, device_mesh: Any = None, *rest: Any, **named: Any) -> Any:
        mesh = _mesh_resources.get_current_mesh() if device_mesh is None else device_mesh
        if not _on_one_host(mesh.mesh.flatten().tolist() if mesh.ndim > 1 else ranks_of(mesh)):
            raise UsageError(ACROSS_HOSTS)
        return parallelize(module, device_mesh, *rest, **named)

    return parallelize_module


def ranks_of(mesh: Any, dimension: int = 0) -> list[int]:
    """Return the ranks of the workers along one dimension of a mesh through this one."""
    ranks: list[int] = dist.get_process_group_ranks(mesh.get_group(dimension))
    return ranks


def _noting_shards(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the check of the mesh of a module for `fully_shard`, which notes once what a mesh with
    workers of several hosts costs.
    """
    noted: set[tuple[int, ...]] = set()

    def note(info: Any) -> None:
        check(info)
        ranks = ranks_of(info.mesh, info.shard_mesh_dim)
        if not _on_one_host(ranks) and tuple(ranks) not in noted:
            noted.add(tuple(ranks))
            if dist.get_rank() == 0:
                LOGGER.warning("%s", SHARDS_ACROSS_HOSTS)

    return note


@contextmanager
def after_import(actions: Mapping[str, Callable[[ModuleType], None]]) -> Iterator[None]:
    """Act on modules, by their names, as soon as they are imported inside the block, or now where
    they are.
    """

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname not in actions:
                return None
            spec = super().find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def execute_and_act(module: ModuleType) -> None:
                    execute(module)
                    actions[fullname](module)

                spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
            return spec

    for name, act in actions.items():
        if name in sys.modules:
            act(sys.modules[name])
    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)


def refusal(sentence: str) -> Callable[..., None]:
    """Return a function that raises a UsageError, whatever its arguments are."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(sentence)

    return refuse


def standing_for(torchs: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator of a function that stands for one of torch's, whose name, documentation and
    signature it gets: scripts and libraries pass only arguments that the signature has.
    """

    def decorate(function: Function) -> Function:
        own: Any = wraps(torchs)(function)
        own.__signature__ = signature(torchs)  # `inspect.getfullargspec` looks at it alone
        return function

    return decorate


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
