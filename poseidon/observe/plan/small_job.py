"""One process of a small job within one machine: a worker or a shard of a store,
a rank of an all-reduce or of DDP's hooks.

Law: figures are processor time of the whole process, so the threads of its sockets count, and
waiting does not.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from poseidon.observe.plan.scenario import INT8
from poseidon.observe.plan.work import RULE
from ps_server import Client, Keeping, Server, Shard, StoreSpec, TableSpec, ZmqServerTransport
from ps_server.network import Network

CHUNK_ELEMENTS = 1 << 19
CHUNKS = 4
"""Chunks of 2 MiB on each shard."""
SMALL_TABLES = 256
SMALL_ELEMENTS = 16
BUCKET_BYTES = 25 * 2**20
"""The default bucket of DDP."""
MATRICES, ROWS = 4, 1024
"""The gradients in the bucket of a hook: square matrices of 4 MiB."""
EXACT_RUNS = 2
"""Runs before PowerSGD begins: the fewest that torch takes."""
LIMIT_S = 60.0
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def store_of(workers: int, small: int, *, int8: bool = False) -> StoreSpec:
    """Return a store of whole chunks with small tables between them.

    The shards add; with int8 they apply a rule.
    """
    large = workers * CHUNKS
    sizes: list[int] = []
    for index in range(large):
        sizes += [
            CHUNK_ELEMENTS,
            *[SMALL_ELEMENTS] * (small * (index + 1) // large - small * index // large),
        ]
    plain = TableSpec(name="", size=1, keeping=Keeping.AVERAGE)
    spec = TableSpec(name="", size=1, rule=RULE, codec=INT8) if int8 else plain
    tables = tuple(replace(spec, name=str(index), size=size) for index, size in enumerate(sizes))
    return StoreSpec(workers=workers, shards=workers, tables=tables)


class SmallShard:
    """A shard in a thread of this process."""

    def __init__(self, index: int, workers: int) -> None:
        self._server = Server(Shard(index, workers), ZmqServerTransport("tcp://127.0.0.1:0"))
        self._thread = threading.Thread(target=self._server.serve, name="small-shard", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        self._server.stop()
        self._thread.join()


class SmallWorker:
    """A worker that pushes all tables of a store and reads them."""

    def __init__(self, rank: int, store: StoreSpec, shards: Sequence[str]) -> None:
        # Between hosts there is no shared memory.
        self._client = Client(
            shards,
            Network(rank=rank, size=store.workers, timeout_s=LIMIT_S),
            store=store,
            share_memory=False,
        )
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
        count: number of all-reduces that are measured.

    Returns:
        Processor seconds for each byte that this process sends, receives, and adds half of the
        time.
    """
    with _gloo(file, rank, size):
        bucket = torch.zeros(BUCKET_BYTES // 4)
        distributed.all_reduce(bucket)
        began_s = time.process_time()
        for _ in range(count):
            distributed.all_reduce(bucket)
        used_s = time.process_time() - began_s
        distributed.barrier()
    return used_s / (count * BUCKET_BYTES * 2 * (size - 1) / size)


def hooks_s_per_byte(
    file: str, rank: int, size: int, hooks: Sequence[int | None], count: int
) -> list[float]:
    """Run communication hooks of torch's DistributedDataParallel, one after the other, on a
    bucket of four matrices.

    Args:
        file: through which the ranks find each other.
        hooks: None: the one that all-reduces float32; 0: float16; R: PowerSGD of rank R.
        count: number of runs of each that are measured.

    Returns:
        For each hook the processor seconds for each byte of float32 gradient.
    """
    found: list[float] = []
    with _gloo(file, rank, size):
        for hook in hooks:
            run, bucket = _hook(hook), _HookBucket()
            for _ in range(EXACT_RUNS + 1):
                run(bucket).wait()
            began_s = time.process_time()
            for _ in range(count):
                run(bucket).wait()
            found.append((time.process_time() - began_s) / (count * MATRICES * 4 * ROWS * ROWS))
            distributed.barrier()
    return found


def _hook(hook: int | None) -> Callable[[Any], Any]:
    """Return a hook with its state; it takes a bucket, and returns a future."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
        allreduce_hook,
        fp16_compress_hook,
    )
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    if not hook:
        plain: Callable[[Any, Any], Any] = allreduce_hook if hook is None else fp16_compress_hook
        return partial(plain, None)
    state = PowerSGDState(None, matrix_approximation_rank=hook, start_powerSGD_iter=EXACT_RUNS)
    return partial(powerSGD_hook, state)


@contextmanager
def _gloo(file: str, rank: int, size: int) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK.get(sys.platform, "lo"))
    limit = timedelta(seconds=LIMIT_S)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=limit
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


class _HookBucket:
    """The methods of torch's GradBucket that its hooks call."""

    def __init__(self) -> None:
        self._matrices = torch.randn(
            MATRICES, ROWS, ROWS, generator=torch.Generator().manual_seed(0)
        )

    def buffer(self) -> Tensor:
        return self._matrices.view(-1)

    def gradients(self) -> list[Tensor]:
        return list(self._matrices)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True
