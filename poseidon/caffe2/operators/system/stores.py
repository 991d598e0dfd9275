"""Operators on the stores through which shards meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import BlobProto
from poseidon.caffe2.runtime.serialization import deserialize, serialize
from poseidon.caffe2.shards.store_handler import StoreHandler, sentences
from poseidon.caffe2.shards.stores import FolderStore, RedisStore
from poseidon.caffe2.shards.tcp_store import TcpStore


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
