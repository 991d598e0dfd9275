"""One process of a small job within one machine: a worker or a shard of a store, and a rank of an all-reduce.

Law: figures are processor time of the whole process, so the threads of its sockets count, and waiting does not.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import distributed

from ps_server import Client, Keeping, Server, Shard, StoreSpec, TableSpec, ZmqServerTransport

CHUNK_ELEMENTS = 1 << 19
CHUNKS = 4
"""Chunks of 2 MiB on each shard."""
SMALL_TABLES = 256
SMALL_ELEMENTS = 16
BUCKET_BYTES = 25 * 2**20
"""The default bucket of DDP."""
LIMIT_S = 60.0
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def store_of(workers: int, small: int) -> StoreSpec:
    """Return a store of whole chunks with small tables between them; the shards add, and have no rule."""
    large = workers * CHUNKS
    sizes: list[int] = []
    for index in range(large):
        sizes += [CHUNK_ELEMENTS, *[SMALL_ELEMENTS] * (small * (index + 1) // large - small * index // large)]
    tables = tuple(
        TableSpec(name=str(index), size=size, keeping=Keeping.AVERAGE) for index, size in enumerate(sizes)
    )
    return StoreSpec(workers=workers, shards=workers, tables=tables)


class SmallShard:
    """A shard in a thread of this process.

    Args:
        index: of the shard.
        workers: number of workers.
    """

    def __init__(self, index: int, workers: int) -> None:
        self._server = Server(Shard(index, workers), ZmqServerTransport("tcp://127.0.0.1:0"))
        self._thread = threading.Thread(target=self._server.serve, name="small-shard", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address at which workers reach it."""
        return self._server.address

    def close(self) -> None:
        """End it."""
        self._server.stop()
        self._thread.join()


class SmallWorker:
    """A worker that pushes all tables of a store and reads them.

    Args:
        rank: of this worker.
        store: the store.
        shards: addresses of its shards.
    """

    def __init__(self, rank: int, store: StoreSpec, shards: Sequence[str]) -> None:
        # Between hosts there is no shared memory.
        self._client = Client(shards, rank=rank, store=store, timeout_s=LIMIT_S, share_memory=False)
        self._values = [np.zeros(table.size, np.float32) for table in store.tables]
        self._gradient = np.zeros(CHUNK_ELEMENTS, np.float32)
        for table, value in enumerate(self._values):
            self._client.bind(table, value)
        self._client.start(lambda table: [self._values[table]])

    def iterate(self) -> None:
        """Push everything, and read it."""
        for table in reversed(range(len(self._values))):
            self._client.push(table, self._gradient[: len(self._values[table])], rate=0.0)
        self._client.clock()
        for table, value in enumerate(self._values):
            self._client.read(table, value)

    def close(self) -> None:
        """Leave the shards."""
        self._client.close()


def all_reduce_s_per_byte(file: str, rank: int, size: int, count: int) -> float:
    """Take part in all-reduces of gloo.

    Args:
        file: through which the ranks find each other.
        rank: of this process.
        size: number of processes.
        count: number of all-reduces that are measured.

    Returns:
        Processor seconds for each byte that this process sends, receives, and adds half of the time.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK.get(sys.platform, "lo"))
    limit = timedelta(seconds=LIMIT_S)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=limit
    )
    try:
        bucket = torch.zeros(BUCKET_BYTES // 4)
        distributed.all_reduce(bucket)
        began_s = time.process_time()
        for _ in range(count):
            distributed.all_reduce(bucket)
        used_s = time.process_time() - began_s
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return used_s / (count * BUCKET_BYTES * 2 * (size - 1) / size)
