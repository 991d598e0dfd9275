"""Small calls of torch.distributed, one after another, whose results are compared between process
groups: `python torch_calls.py FOLDER HOW`, on every worker. HOW is a backend to initialize, `made`
where there is a group, or `library`.

Each worker writes FOLDER/<rank>.json: by case what the call returned, or the error that it raised.
A case makes the same calls on all workers, also where one of them is refused.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

dist: Any = torch.distributed
Case = Callable[[int, int], object]
CASES: dict[str, Case] = {}
"""By name; what stands before a colon is the row of the table."""
NAMES: dict[str, tuple[str, ...]] = {}
"""The functions of torch.distributed that a row is about."""
TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool")
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SECONDS = timedelta(seconds=60)


def case(row: str, *names: str) -> Callable[[Case], Case]:
    """Add a case to a row of the table.

    Args:
        names: the functions of torch.distributed that it calls; none: as the row's cases so far.
    """

    def add(function: Case) -> Case:
        NAMES[row] = (*NAMES.get(row, ()), *names)
        CASES[f"{row}: {function.__name__}"] = function
        return function

    return add


def own(rank: int, dtype: str = "float32") -> torch.Tensor:
    return (torch.arange(4) % 3 + rank + 1).to(getattr(torch, dtype))


def attempt(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the kinds of errors are compared
        return {"raises": type(error).__name__, "text": str(error).splitlines()[0]}


def kind(call: Callable[[], object]) -> str:
    """Return whether a call is refused; of a group that it makes, nothing."""
    found = attempt(call)
    return "refused" if isinstance(found, dict) else "made"


def _reduce(name: str, operation: str, dtype: str) -> Case:
    def call(rank: int, size: int) -> object:
        tensor = own(rank, dtype)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
        return [str(tensor.dtype), tensor.tolist()]

    call.__name__ = name
    return call


for _operation in OPERATIONS:
    for _dtype in TYPES:
        case("`all_reduce` with every operation and type", "all_reduce")(
            _reduce(f"{_operation} of {_dtype}", _operation, _dtype)
        )


@case("`all_reduce` with every operation and type")
def complex_numbers(rank: int, size: int) -> object:
    tensor = torch.tensor([1 + 2j, 3j]) * (rank + 1)
    dist.all_reduce(tensor)
    return torch.view_as_real(tensor).tolist()


@case("`all_reduce` with every operation and type", "reduce_op")
def of_an_empty_tensor(rank: int, size: int) -> object:
    tensor = torch.zeros(0)
    dist.all_reduce(tensor)
    return tensor.tolist()


@case("`all_reduce` with every operation and type", "all_reduce_coalesced")
def coalesced(rank: int, size: int) -> object:
    tensors = [own(rank), own(rank)[:2]]
    dist.all_reduce_coalesced(tensors)
    return [tensor.tolist() for tensor in tensors]


@case("`async_op=True`: `wait`, `is_completed`, `get_future`, `result`", "Work")
def of_a_sum(rank: int, size: int) -> object:
    tensor = own(rank)
    work = dist.all_reduce(tensor, async_op=True)
    found = work.wait(), work.is_completed(), work.is_success(), work.exception() is None
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return [*found, future.wait()[0].tolist(), future.done(), tensor.tolist()]


@case("`async_op=True`: `wait`, `is_completed`, `get_future`, `result`")
def of_several_at_once(rank: int, size: int) -> object:
    tensors = [own(rank) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    return [
        [work.wait(SECONDS), tensor.tolist()] for work, tensor in zip(works, tensors, strict=True)
    ]


@case("`broadcast`", "broadcast")
def from_the_last(rank: int, size: int) -> object:
    tensor = own(rank)
    dist.broadcast(tensor, src=size - 1)
    return tensor.tolist()


@case("`all_gather`, also as one tensor", "all_gather")
def as_a_list(rank: int, size: int) -> object:
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, own(rank))
    return [part.tolist() for part in parts]


@case("`all_gather`, also as one tensor")
def with_other_shapes(rank: int, size: int) -> object:
    parts = [torch.zeros(3) for _ in range(size)]
    return kind(lambda: dist.all_gather(parts, own(rank)))


@case(
    "`all_gather`, also as one tensor",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_coalesced",
)
def as_one_tensor(rank: int, size: int) -> object:
    whole = torch.zeros(size * 4)
    dist.all_gather_into_tensor(whole, own(rank))
    flat = torch.zeros(size * 4, dtype=torch.int64)
    dist.all_gather_into_tensor(flat, own(rank, "int64"))
    single = torch.zeros(size * 4)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(single, own(rank))
    return [whole.tolist(), flat.tolist(), single.tolist()]


@case("`gather`, `scatter`", "gather", "scatter")
def to_one_and_from_one(rank: int, size: int) -> object:
    parts = [torch.zeros(4) for _ in range(size)] if rank == 1 else None
    dist.gather(own(rank), parts, dst=1)
    tensor = torch.zeros(4)
    dist.scatter(tensor, [own(10 * other) for other in range(size)] if rank == 2 else None, src=2)
    return [[part.tolist() for part in parts or []], tensor.tolist()]


@case("`gather`, `scatter`")
def with_a_list_that_is_too_short(rank: int, size: int) -> object:
    if rank != 1:
        return None
    return attempt(lambda: dist.gather(own(rank), [torch.zeros(4)], dst=0))


@case("`reduce`, `reduce_scatter`, also of one tensor", "reduce")
def to_the_last(rank: int, size: int) -> object:
    tensor = own(rank)
    dist.reduce(tensor, dst=size - 1, op=dist.ReduceOp.MAX)
    return tensor.tolist() if rank == size - 1 else None


@case(
    "`reduce`, `reduce_scatter`, also of one tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
def in_parts(rank: int, size: int) -> object:
    out, whole = torch.zeros(4), torch.zeros(2)
    dist.reduce_scatter(out, [own(rank + other) for other in range(size)])
    dist.reduce_scatter_tensor(whole, torch.arange(2.0 * size) * (rank + 1))
    return [out.tolist(), whole.tolist()]


@case("`all_to_all`, `all_to_all_single`", "all_to_all")
def of_lists(rank: int, size: int) -> object:
    out = [torch.zeros(4) for _ in range(size)]
    dist.all_to_all(out, [own(10 * rank + other) for other in range(size)])
    return [part.tolist() for part in out]


@case("`all_to_all`, `all_to_all_single`", "all_to_all_single")
def of_unequal_parts(rank: int, size: int) -> object:
    out = torch.zeros(size * (rank + 1))
    whole = torch.arange(float(sum(range(1, size + 1)))) + 100 * rank
    dist.all_to_all_single(out, whole, [rank + 1] * size, list(range(1, size + 1)))
    even = torch.zeros(size)
    dist.all_to_all_single(even, torch.arange(float(size)) + 10 * rank)
    return [out.tolist(), even.tolist()]


@case("collectives of objects", "all_gather_object", "gather_object")
def gathered(rank: int, size: int) -> object:
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "long": "x" * 3000 * rank})
    one: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, "a"), one, dst=0)
    return [[len(e["long"]) for e in every], one]


@case("collectives of objects", "broadcast_object_list", "scatter_object_list")
def spread(rank: int, size: int) -> object:
    found: list[Any] = [{"from": rank}, None]
    dist.broadcast_object_list(found, src=1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    return [found, mine]


@case("collectives of objects", "send_object_list", "recv_object_list")
def sent(rank: int, size: int) -> object:
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=1)
    found: list[Any] = [None, None]
    if rank == 1:
        dist.recv_object_list(found, src=0)
    return found


@case("`send`, `recv`, `isend`, `irecv`", "send", "recv")
def with_tags(rank: int, size: int) -> object:
    if rank == 0:
        for work in [dist.isend(own(1), 1, tag=1), dist.isend(own(2), 1, tag=2)]:
            work.wait()
    tensors = [torch.zeros(4), torch.zeros(4)]
    if rank == 1:
        sources = [dist.recv(tensors[1], 0, tag=2), dist.recv(tensors[0], 0, tag=1)]
        return [sources, [tensor.tolist() for tensor in tensors]]
    return None


@case("`send`, `recv`, `isend`, `irecv`")
def without_a_source(rank: int, size: int) -> object:
    if rank:
        dist.send(own(rank), 0)
        dist.barrier()  # a later message may have no other receiver
        return None
    found = []
    for _ in range(size - 1):
        tensor = torch.zeros(4)
        source = dist.recv(tensor)
        found.append([source, tensor.tolist()])
    dist.barrier()
    return sorted(found)


@case("`send`, `recv`, `isend`, `irecv`")
def to_itself(rank: int, size: int) -> object:
    return attempt(lambda: dist.send(own(rank), rank))


@case("`send`, `recv`, `isend`, `irecv`", "isend", "irecv", "batch_isend_irecv", "P2POp")
def around_a_ring(rank: int, size: int) -> object:
    after, before = (rank + 1) % size, (rank - 1) % size
    first, second = torch.zeros(4), torch.zeros(4)
    works = [dist.irecv(first, before), dist.isend(own(rank), after)]
    for work in works:
        work.wait()
    ops = [dist.P2POp(dist.isend, own(rank), after), dist.P2POp(dist.irecv, second, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [first.tolist(), second.tolist()]


@case("`barrier`", "barrier")
def also_in_the_background(rank: int, size: int) -> object:
    dist.barrier()
    return dist.barrier(async_op=True).wait()


@case("`monitored_barrier`, also of a group", "monitored_barrier")
def of_all_and_of_some(rank: int, size: int) -> object:
    found = [attempt(lambda: dist.monitored_barrier(timeout=SECONDS, wait_all_ranks=True))]
    group = dist.new_group(backend="gloo", timeout=SECONDS)
    return [*found, group.monitored_barrier(), group.monitored_barrier(SECONDS)]


@case("`new_group` with `backend`, `timeout`, `use_local_synchronization`")
def of_its_own_members(rank: int, size: int) -> object:
    everybody = list(range(size))
    group = dist.new_group(everybody, use_local_synchronization=True, group_desc="mine")
    tensor = own(rank)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return tensor.tolist()


@case("`new_group` with `backend`, `timeout`, `use_local_synchronization`", "new_group")
def of_some(rank: int, size: int) -> object:
    group = dist.new_group([0, 2], backend="gloo", timeout=SECONDS)
    tensor = own(rank)
    if rank != 1:
        dist.all_reduce(tensor, group=group)
    names = None if rank == 1 else [dist.get_backend(group), group.size(), group.rank()]
    return [tensor.tolist(), names, dist.get_rank(group), dist.get_world_size(group)]


@case("`new_group` with `backend`, `timeout`, `use_local_synchronization`", "Backend")
def of_an_unknown_backend_and_ranks(rank: int, size: int) -> object:
    return [
        kind(lambda: dist.new_group([0, 7])),
        kind(lambda: dist.new_group([0, 0])),
        kind(lambda: dist.new_group(backend="nosuch")),
    ]


@case("`new_subgroups`, `new_subgroups_by_enumeration`", "new_subgroups")
def of_one_each(rank: int, size: int) -> object:
    mine, every = dist.new_subgroups(group_size=1)
    return [mine.size(), len(every), attempt(lambda: dist.new_subgroups(group_size=2) and None)]


@case("`new_subgroups`, `new_subgroups_by_enumeration`", "new_subgroups_by_enumeration")
def enumerated(rank: int, size: int) -> object:
    mine, every = dist.new_subgroups_by_enumeration([[2, 0], [1]], backend="gloo")
    tensor = own(rank)
    dist.all_reduce(tensor, group=mine)
    return [tensor.tolist(), len(every), dist.get_process_group_ranks(mine)]


@case("`split_group`, `shrink_group`", "split_group", "shrink_group")
def refused(rank: int, size: int) -> object:
    return [
        kind(lambda: dist.split_group(split_ranks=[[0, 1], [2]])),
        kind(lambda: dist.shrink_group([2])),
    ]


@case(
    "ranks: `get_rank`, `get_world_size`, `get_group_rank`, `get_global_rank`, ...",
    "get_rank",
    "get_world_size",
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
    "get_pg_count",
    "get_node_local_rank",
    "group",
    "GroupMember",
)
def of_a_group(rank: int, size: int) -> object:
    group = dist.new_group([0, 2])
    found: list[object] = [dist.get_rank(), dist.get_world_size(), dist.get_pg_count() > 1]
    found.append(attempt(lambda: dist.get_node_local_rank(fallback_rank=0)))
    if rank != 1:
        found += [dist.get_group_rank(group, 2), dist.get_global_rank(group, 1)]
        found += [dist.get_process_group_ranks(group), kind(lambda: dist.get_group_rank(group, 1))]
    return found


@case(
    "`is_initialized`, `is_available`, `is_gloo_available`, ...",
    "is_initialized",
    "is_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_gloo_available",
    "is_ucc_available",
    "is_xccl_available",
    "is_backend_available",
    "get_default_backend_for_device",
    "get_debug_level",
    "supports_complex",
)
def facts(rank: int, size: int) -> object:
    return [
        dist.is_available(),
        dist.is_initialized(),
        dist.is_gloo_available(),
        dist.is_nccl_available(),
        dist.is_mpi_available(),
        dist.is_backend_available("gloo"),
        dist.get_default_backend_for_device("cpu"),
        str(dist.get_debug_level()),
    ]


@case("`is_torchelastic_launched`", "is_torchelastic_launched")
def is_launched(rank: int, size: int) -> object:
    return dist.is_torchelastic_launched()


@case("`get_backend`, `get_backend_config`", "get_backend", "get_backend_config", "BackendConfig")
def of_the_default_group(rank: int, size: int) -> object:
    return [dist.get_backend(), dist.get_backend_config()]


@case(
    "the default store (`_get_default_store`): values, waits, counters, queues",
    "Store",
    "PrefixStore",
)
def shared(rank: int, size: int) -> object:
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(SECONDS)
    store.set(f"key{rank}", f"value{rank}")
    found: list[object] = [store.get(f"key{(rank + 1) % size}").decode()]
    store.wait([f"key{other}" for other in range(size)])
    prefixed = dist.PrefixStore("mine", store)
    prefixed.set(f"key{rank}", "prefixed")
    found += [prefixed.get(f"key{(rank + 2) % size}").decode(), store.check(["key0", "nosuch"])]
    dist.barrier()
    store.add("count", rank + 1)
    dist.barrier()
    found += [store.add("count", 0), store.get("count").decode()]
    dist.barrier()
    if rank == 0:
        found += [
            store.compare_set("one", "", "a").decode(),
            store.compare_set("one", "b", "c").decode(),
            store.compare_set("one", "a", "d").decode(),
            store.delete_key("one"),
            store.check(["one"]),
        ]
        store.append("list", "a")
        store.append("list", "b")
        store.multi_set(["m1", "m2"], ["1", "2"])
    dist.barrier()
    found += [store.get("list").decode(), [v.decode() for v in store.multi_get(["m1", "m2"])]]
    if rank == 1:
        store.queue_push("queue", "first")
    if rank == 2:
        found.append(store.queue_pop("queue").decode())
    dist.barrier()
    return [*found, store.queue_len("queue"), store.has_extended_api()]


@case("the default store (`_get_default_store`): values, waits, counters, queues", "DistStoreError")
def a_wait_in_vain(rank: int, size: int) -> object:
    store = dist.distributed_c10d._get_default_store()
    found = attempt(lambda: store.wait(["never"], timedelta(seconds=0.1)))
    assert isinstance(found, dict)
    return found["raises"]


STORES = "`TCPStore` at `MASTER_ADDR` and `MASTER_PORT`, `FileStore`, `HashStore`"


@case(STORES, "TCPStore")
def of_the_script(rank: int, size: int) -> object:
    if "MASTER_PORT" not in os.environ:
        return None
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ.get("SCRIPT_PORT", os.environ["MASTER_PORT"])),
        size,
        is_master=rank == 0,
        timeout=SECONDS,
    )
    store.set(f"key{rank}", "value")
    found = store.get(f"key{(rank + 1) % size}").decode()
    dist.barrier()
    return found


@case(STORES, "FileStore", "HashStore")
def of_a_file(rank: int, size: int) -> object:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    store = dist.FileStore(f"{folder[0]}/store", size)
    store.set(f"key{rank}", "value")
    found = store.get(f"key{(rank + 1) % size}").decode()
    alone = dist.HashStore()
    alone.set("a", "b")
    dist.barrier()
    return [found, alone.get("a").decode()]


@case("`torch.distributed.checkpoint`: `save`, `load`, `async_save`")
def saved_and_loaded(rank: int, size: int) -> object:
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    state = {"a": torch.arange(4.0), f"of{rank}": torch.full((2,), float(rank))}
    dcp.save(state, checkpoint_id=f"{folder[0]}/one")
    dcp.async_save(state, checkpoint_id=f"{folder[0]}/two").result()
    found = []
    for name in ("one", "two"):
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(loaded, checkpoint_id=f"{folder[0]}/{name}")
        found.append({key: value.tolist() for key, value in loaded.items()})
    return found


@case("state dicts: `get_model_state_dict`, `set_model_state_dict(broadcast_from_rank0=True)`")
def from_rank_0(rank: int, size: int) -> object:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = {"weight": torch.ones(1, 2), "bias": torch.ones(1)} if rank == 0 else {}
    set_model_state_dict(model, given, options=options)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.tolist() for name, value in full.items()}


@case("`torch.distributed.nn.functional`, with gradients")
def sums_with_gradients(rank: int, size: int) -> object:
    from torch.distributed.nn import functional

    weight = own(rank).requires_grad_()
    (functional.all_reduce(weight * 2) * (rank + 1)).sum().backward()
    first = weight.grad
    assert first is not None
    gathered = functional.all_gather(weight)
    weight.grad = None
    (torch.stack(gathered) * (rank + 1)).sum().backward()
    assert weight.grad is not None
    return [first.tolist(), weight.grad.tolist()]


@case("functional collectives (`torch.distributed._functional_collectives`)")
def functional_collectives(rank: int, size: int) -> object:
    import torch.distributed._functional_collectives as funcol

    world = dist.group.WORLD
    return [
        funcol.all_reduce(own(rank), "sum", world).tolist(),
        funcol.all_gather_tensor(own(rank), 0, world).tolist(),
        funcol.reduce_scatter_tensor(torch.arange(2.0 * size), "sum", 0, world).tolist(),
        funcol.broadcast(own(rank), 1, world).tolist(),
        funcol.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, world).tolist(),
    ]


def small(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def gradients(ddp: nn.Module) -> list[Any]:
    return [
        None if p.grad is None else [round(float(x), 4) for x in p.grad.flatten()]
        for p in ddp.parameters()
    ]


def trained(rank: int, steps: int = 2, **named: Any) -> object:
    ddp = nn.parallel.DistributedDataParallel(small(), **named)
    for step in range(steps):
        ddp.zero_grad()
        ddp(torch.arange(6.0).view(2, 3) * (rank + 1 + step)).pow(2).mean().backward()
    return gradients(ddp)


DDP = "`DistributedDataParallel` with each of its arguments, `no_sync`, `join`"


@case(DDP)
def plain(rank: int, size: int) -> object:
    return trained(rank)


@case(DDP)
def with_unused_parameters(rank: int, size: int) -> object:
    return trained(rank, find_unused_parameters=True)


@case(DDP)
def of_a_static_graph(rank: int, size: int) -> object:
    return trained(rank, static_graph=True)


@case(DDP)
def with_gradients_as_views(rank: int, size: int) -> object:
    return trained(rank, gradient_as_bucket_view=True)


@case(DDP)
def with_a_group(rank: int, size: int) -> object:
    group = dist.new_group([0, 2])
    return trained(rank, process_group=group) if rank != 1 else None


@case(DDP)
def without_synchronization(rank: int, size: int) -> object:
    ddp = nn.parallel.DistributedDataParallel(small())
    data = torch.ones(2, 3) * (rank + 1)
    with ddp.no_sync():
        ddp(data).sum().backward()
    before = gradients(ddp)
    ddp(data).sum().backward()
    return [before, gradients(ddp)]


@case(DDP)
def with_the_join_of_ddp(rank: int, size: int) -> object:
    ddp = nn.parallel.DistributedDataParallel(small())
    with ddp.join():
        for _ in range(rank + 1):
            ddp.zero_grad()
            ddp(torch.ones(2, 3)).sum().backward()
    return gradients(ddp)


@case(DDP)
def with_the_means_of_those_that_have_inputs(rank: int, size: int) -> object:
    ddp = nn.parallel.DistributedDataParallel(small())
    found = []
    for divide in (True, False):
        with ddp.join(divide_by_initial_world_size=divide):
            for _ in range(rank + 1):
                ddp.zero_grad()
                ddp(torch.full((2, 3), rank + 1.0)).square().sum().backward()
                found.append(gradients(ddp))
    return found


@case("`torch.distributed.algorithms.Join`, hooks (`fp16_compress_hook`, `powerSGD_hook`)")
def with_hooks(rank: int, size: int) -> object:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    ddp = nn.parallel.DistributedDataParallel(small())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ddp(torch.ones(2, 3) * (rank + 1)).sum().backward()
    other = nn.parallel.DistributedDataParallel(small())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    other.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        other.zero_grad()
        other(torch.ones(2, 3) * (rank + 1)).sum().backward()
    return [[g and [round(x, 2) for x in g] for g in gradients(m)] for m in (ddp, other)]


@case("`ZeroRedundancyOptimizer`, `PostLocalSGDOptimizer`")
def optimizers(rank: int, size: int) -> object:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    ddp = nn.parallel.DistributedDataParallel(small())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    for _ in range(2):
        zero.zero_grad()
        ddp(torch.ones(2, 3) * (rank + 1)).sum().backward()
        zero.step()
    zero.consolidate_state_dict(0)
    kept = len(zero.state_dict()["state"]) if rank == 0 else 0
    local = small()
    averaging = PostLocalSGDOptimizer(
        torch.optim.SGD(local.parameters(), lr=0.01),
        PeriodicModelAverager(period=2, warmup_steps=0),
    )
    for _ in range(4):
        averaging.zero_grad()
        local(torch.ones(2, 3) * (rank + 1)).sum().backward()
        averaging.step()
    weights = [
        round(float(x), 4) for m in (ddp, local) for p in m.parameters() for x in p.flatten()
    ]
    return [kept, weights]


@case("sparse gradients (`nn.Embedding(sparse=True)`)")
def rows(rank: int, size: int) -> object:
    torch.manual_seed(1)
    net = nn.Embedding(7, 2, sparse=True)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(net, nn.Linear(2, 1)))
    found = []
    for step in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([[rank, rank + 1 + step, rank]])[: rank + step]).sum().backward()
        gradient = net.weight.grad
        assert gradient is not None
        dense = [[round(float(x), 3) for x in row] for row in gradient.to_dense()]
        found.append([gradient.is_sparse, gradient.is_coalesced(), gradient._nnz(), dense])
    return found


@case("`init_device_mesh`, `DistributedDataParallel(device_mesh=...)`", "init_device_mesh")
def of_one_dimension(rank: int, size: int) -> object:
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    found = [mesh.size(), mesh.get_rank(), mesh.get_local_rank("data"), mesh.get_group().size()]
    return [*found, mesh["data"].ndim, trained(rank, device_mesh=mesh)]


@case("`fully_shard`, `FullyShardedDataParallel`, `distribute_tensor`")
def sharded(rank: int, size: int) -> object:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = dist.init_device_mesh("cpu", (size,))
    return [
        attempt(lambda: fully_shard(small()) and None),
        attempt(lambda: fully_shard(small(), mesh=mesh) and None),
        attempt(lambda: distribute_tensor(own(0), mesh).shape[0]),
    ]


@case("`SyncBatchNorm` on the CPU")
def normalized(rank: int, size: int) -> object:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
    found = attempt(lambda: net(torch.arange(6.0).view(2, 3) * (rank + 1)).tolist())
    return found["raises"] if isinstance(found, dict) else found


@case("`torch.distributed.rpc.init_rpc`", "rpc")
def remote_calls(rank: int, size: int) -> object:
    from torch.distributed import rpc

    def call() -> object:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
        rpc.shutdown()
        return None

    return attempt(call)


@case("under `torch.inference_mode()`")
def in_inference_mode(rank: int, size: int) -> object:
    with torch.inference_mode():
        tensor, parts = own(rank), [torch.zeros(4) for _ in range(size)]
        dist.all_reduce(tensor)
        dist.all_gather(parts, own(rank))
        return [tensor.tolist(), [part.tolist() for part in parts]]


@case("`destroy_process_group`, and `init_process_group` again", "destroy_process_group")
def of_a_part(rank: int, size: int) -> object:
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.destroy_process_group(group)
    return attempt(lambda: dist.init_process_group("gloo"))


def gathering(folder: Path, rank: int, size: int) -> Callable[[str], list[str]]:
    """Return what exchanges payloads among all workers, through files."""
    rounds = itertools.count()

    def gather(payload: str) -> list[str]:
        store = dist.FileStore(str(folder / f"round{next(rounds)}"), size)
        store.set(str(rank), payload)
        return [store.get(str(other)).decode() for other in range(size)]

    return gather


def join_alone(folder: Path) -> None:
    """Make the process group as `poseidon.ray_train` does: without a launcher of Poseidon."""
    from poseidon.exchange.options import DEFAULT_OPTIONS
    from poseidon.torch.ddp_replicas import modules_compared
    from poseidon.torch.process_group.functions import groups_of_job, initialize, register
    from poseidon.torch.process_group.mesh import Mesh
    from ps_server.network import Network

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network = Network(rank=rank, size=size, token=b"secret")
    mesh = Mesh(network, gathering(folder, rank, size))
    register(mesh)
    mesh.at_close.enter_context(groups_of_job())
    mesh.at_close.enter_context(modules_compared(DEFAULT_OPTIONS))
    initialize(mesh)


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    if how == "library":
        join_alone(folder)
    elif how != "made":
        dist.init_process_group(how, timeout=SECONDS)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {name: attempt(partial(one, rank, size)) for name, one in CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    world: Any = dist.group.WORLD
    dist.destroy_process_group()
    if how == "library":
        world.mesh.close()  # as `poseidon.ray_train.leave`


if __name__ == "__main__":
    main()
