"""Collectives between shards (common worlds) and devices (NCCL), and stores to meet in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.cuda import comm

from poseidon.caffe2.operators.registry import ANY, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import BlobProto
from poseidon.caffe2.runtime.values import deserialize, serialize
from poseidon.caffe2.shards.buckets import Buckets, DevicesOfProcess, Pending, have_a_gpu_each
from poseidon.caffe2.shards.common_world import CommonWorld
from poseidon.caffe2.shards.store_handler import CollectiveError, StoreHandler, sentences
from poseidon.caffe2.shards.stores import FolderStore, RedisStore, TcpStore


@operator("FileStoreHandlerCreate")
def file_store_handler_create(*, path: str, prefix: str = "") -> Any:
    """Return the handler of a store in a folder that all shards share.

    Args:
        path: the folder.
        prefix: the run id; each start needs a new one.
    """
    with sentences():
        return StoreHandler(FolderStore(path, prefix), run=prefix or path)


@operator("RedisStoreHandlerCreate")
def redis_store_handler_create(*, host: str, port: int, prefix: str = "") -> Any:
    """Return the handler of a store on a Redis server.

    Args:
        host, port: of the server.
        prefix: the run id; each start needs a new one.
    """
    with sentences():
        return StoreHandler(RedisStore(host, port, prefix), run=prefix or f"{host}:{port}")


@operator("TCPStoreHandlerCreate")
def tcp_store_handler_create(*, host: str, port: int, prefix: str = "", serve: bool = False) -> Any:
    """Return the handler of a store in the memory of one shard. Caffe2 has none.

    Args:
        host, port: of the shard that serves.
        prefix: the run id.
        serve: whether it is this one.
    """
    with sentences():
        return StoreHandler(
            TcpStore(host, port, prefix, serve=serve), run=prefix or f"{host}:{port}"
        )


def _key(name: str) -> str:
    return f"blob/{name}"


@operator("StoreSet", outputs=(0, 0))
def store_set(handler: StoreHandler, data: Any, *, context: Context, blob_name: str = "") -> None:
    """Set a key to a blob, once; the key is by default the blob's name."""
    name = blob_name or context.definition.input[1]
    (message,) = serialize(name, data, chunk_size=-1)
    with sentences():
        handler.store.set(_key(name), message.SerializeToString())


@operator("StoreGet")
def store_get(handler: StoreHandler, *, context: Context, blob_name: str = "") -> Any:
    """Return the blob of a key, by default the output's name; wait until it is set."""
    with sentences():
        content = handler.store.get(_key(blob_name or context.definition.output[0]))
    return deserialize(BlobProto.FromString(content), None)


@operator("StoreAdd")
def store_add(handler: StoreHandler, *, blob_name: str, add_value: int = 1) -> Tensor:
    """Add to a counter of the store; return what it is now, int64 of shape [1]."""
    with sentences():
        return torch.tensor([handler.store.add(blob_name, add_value)])


@operator("StoreWait", outputs=(0, 0))
def store_wait(
    handler: StoreHandler,
    names: np.ndarray | None = None,
    *,
    blob_names: list[str] = [],  # noqa: B006 (it is not changed)
) -> None:
    """Wait until keys are set, given as the argument or as the input, a tensor of strings."""
    wanted = blob_names if names is None else [bytes(name).decode() for name in names.reshape(-1)]
    with sentences():
        handler.store.wait([_key(name) for name in wanted])


Result = TypeVar("Result")
DEFAULT_TIMEOUT_MS = 30_000


def _name_of(context: Context) -> str:
    return context.definition.name or context.definition.output[0]


def _or_status(
    context: Context, status_blob: str, call: Callable[[], Result], failed: Result
) -> Result:
    """Return what a call returns; a status blob, if any, gets the sentence of a failure."""
    try:
        return call()
    except CollectiveError as error:
        if not status_blob:
            raise
        context.workspace.create(status_blob).value = str(error).encode(errors="backslashreplace")
        return failed


@operator("CreateCommonWorld")
def create_common_world(
    handler: StoreHandler | None = None,
    existing: CommonWorld | None = None,
    *,
    context: Context,
    size: int,
    rank: int,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    interface: str = "",
    status_blob: str = "",
) -> Any:
    """Return the common world of all shards, or with `existing` another one of its shards.

    Args:
        handler: of the store where the shards meet; not needed for one shard.
        existing: a world.
        context: its operator's name becomes the world's.
        size: the number of shards.
        rank: the number of this one.
        timeout_ms: longest time that the rendezvous and each operation of the world wait.
        interface: the network interface or address that others reach; of several the first.
        status_blob: gets the sentence of a failure, in place of an error.

    Raises:
        CollectiveError: the shards do not meet.
    """

    def make() -> Any:
        if existing is not None:
            return existing.clone(_name_of(context))
        return CommonWorld(
            handler,
            _name_of(context),
            rank=rank,
            size=size,
            timeout_s=timeout_ms / 1000,
            interface=interface.partition(",")[0],
            engine=context.definition.engine or "GLOO",
        )

    return _or_status(context, status_blob, make, None)


@operator("CloneCommonWorld")
def clone_common_world(existing: CommonWorld, *, context: Context) -> Any:
    """Return another common world of the same shards."""
    return existing.clone(_name_of(context))


@operator("DestroyCommonWorld", outputs=(0, 1))
def destroy_common_world(world: CommonWorld) -> Any:
    """End a common world; operations of other shards that wait for this one fail."""
    world.close()
    return world


@operator(
    "Allreduce", start=lambda buckets, owned, world, *xs: buckets.all_reduce(world, xs, owned)
)
def all_reduce(
    world: CommonWorld, *tensors: Tensor, context: Context, status_blob: str = ""
) -> tuple[Tensor, ...]:
    """Return the sum over all tensors of all shards, once for each tensor."""
    if context.device.type == "meta":
        return tensors
    return tuple(_or_status(context, status_blob, lambda: world.all_reduce(tensors), list(tensors)))


@operator(
    "Broadcast", start=lambda buckets, _, world, *xs, root=0: buckets.broadcast(world, xs, root)
)
def broadcast(
    world: CommonWorld, *tensors: Tensor, context: Context, root: int = 0, status_blob: str = ""
) -> tuple[Tensor, ...]:
    """Return the first tensor of the shard `root`, once for each tensor."""
    if context.device.type == "meta":
        return tensors
    return tuple(
        _or_status(context, status_blob, lambda: world.broadcast(tensors, root), list(tensors))
    )


@operator("Reduce")
def reduce(world: CommonWorld, x: Tensor, *, context: Context, root: int = 0) -> Tensor:
    """Return the sum over all shards on the shard `root`."""
    return x if context.device.type == "meta" else world.reduce(x, root)


@operator("Allgather", inputs=(2, ANY))
def all_gather(world: CommonWorld, *tensors: Tensor, context: Context) -> Tensor:
    """Return the tensors of all shards one after the other along the first dimension, by rank.

    Their sizes there may differ. The result's shape depends on the shards: it is not inferred.
    """
    return world.all_gather(tensors)


@operator("ReduceScatter", inputs=(3, ANY))
def reduce_scatter(world: CommonWorld, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return this shard's part of the sum over all tensors of all shards, once for each tensor.

    The last input has the number of values of each shard's part.
    """
    return tuple(world.reduce_scatter(tensors[:-1], [int(count) for count in tensors[-1].tolist()]))


@operator("Barrier", outputs=(0, 0), start=lambda buckets, _, world: buckets.barrier(world))
def barrier(world: CommonWorld, *, context: Context, status_blob: str = "") -> None:
    """Wait until all shards are here."""
    _or_status(context, status_blob, world.barrier, None)


@operator("SendTensor", inputs=(2, 4), outputs=(0, 0))
def send_tensor(
    world: CommonWorld,
    x: Tensor,
    to: Tensor | None = None,
    tag_: Tensor | None = None,
    *,
    dst: int = 0,
    tag: int = 0,
) -> None:
    """Send a tensor to a shard's `ReceiveTensor`; inputs `dst` and `tag` replace the arguments."""
    world.send(x, dst if to is None else int(to), tag if tag_ is None else int(tag_))


@operator("ReceiveTensor", inputs=(2, 4))
def receive_tensor(
    world: CommonWorld,
    like: Tensor,
    sender: Tensor | None = None,
    tag_: Tensor | None = None,
    *,
    src: int = 0,
    tag: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a shard's tensor, of the shape and type of `like`, its sender and its tag."""
    rank = src if sender is None else int(sender)
    number = tag if tag_ is None else int(tag_)
    received = world.receive(like, rank, number)
    ranks, tags = (torch.tensor([value], dtype=torch.int32) for value in (rank, number))
    return received, ranks, tags


def _start_sum(buckets: Buckets, _: bool, *tensors: Tensor) -> Pending:
    return buckets.all_reduce(DevicesOfProcess(tensors), tensors)


@operator("NCCLAllreduce", inputs=(1, ANY), outputs=(1, ANY), expected="*S, ...", start=_start_sum)
def nccl_all_reduce(*tensors: Tensor) -> list[Tensor]:
    """Return the sum of all inputs on the device of each: on a GPU each by one call of NCCL, which
    sums below 1 MiB of consecutive operators share.
    """
    return DevicesOfProcess(tensors).start_all_reduce(tensors)()


def _start_copy(buckets: Buckets, _: bool, *tensors: Tensor, root: int = 0) -> Pending:
    return buckets.all_reduce(DevicesOfProcess(tensors, root), tensors)


@operator("NCCLBroadcast", inputs=(1, ANY), outputs=(1, ANY), start=_start_copy)
def nccl_broadcast(*tensors: Tensor, root: int = 0) -> list[Tensor]:
    """Return a copy of the input `root` on the device of each."""
    return DevicesOfProcess(tensors, root).start_all_reduce([tensors[root]])()


def _sum_of_devices(tensors: Sequence[Tensor], target: int = 0) -> Tensor:
    """Return the sum of tensors on the device of one of them."""
    if have_a_gpu_each(tensors):
        total: Tensor = comm.reduce_add(list(tensors), tensors[target].get_device())  # by NCCL
        return total
    total = tensors[0].to(tensors[target].device, copy=True)
    for other in tensors[1:]:
        total.add_(other.to(total.device))
    return total


@operator("NCCLReduce", inputs=(1, ANY), expected="*S, ...")
def nccl_reduce(*tensors: Tensor, root: int = 0) -> Tensor:
    """Return the sum of all inputs on the device of the input `root`."""
    return _sum_of_devices(tensors, root)


@operator("NCCLAllGather", inputs=(1, ANY), outputs=(1, ANY), expected="*S, ...")
def nccl_all_gather(*tensors: Tensor) -> list[Tensor]:
    """Return all inputs stacked, on the device of each."""
    return [torch.stack([other.to(tensor.device) for other in tensors]) for tensor in tensors]


@operator("NCCLReduceScatter", inputs=(1, ANY), outputs=(1, ANY), expected="*S, ...")
def nccl_reduce_scatter(*tensors: Tensor) -> list[Tensor]:
    """Return the parts of the inputs' sum by first dimension: part i on device i."""
    parts = _sum_of_devices(tensors).chunk(len(tensors))
    pieces = [part.squeeze(0) if len(part) == 1 else part for part in parts]
    return [part.to(x.device, copy=True) for part, x in zip(pieces, tensors, strict=True)]
