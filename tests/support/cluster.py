"""A store of S shards and W workers in one process: threads over the memory transport, or over
sockets.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np

from poseidon.exchange.options import ExchangeKind
from ps_server import Client, Server, Shard, StoreSpec, ZmqServerTransport
from ps_server.network import Network
from ps_server.protocol.messages import Array
from tests.support.memory_transport import Faults, MemoryNetwork
from tests.support.threads import on_threads

TOKEN = b"the job's secret"
TIMEOUT_S = 20.0

WorkerBody = Callable[[Client, int], None]


class Connect(Protocol):
    """Creates the client of a rank."""

    def __call__(self, rank: int, store: StoreSpec) -> Client: ...


@contextmanager
def memory_store(
    workers: int,
    shards: int,
    faults: Faults | None = None,
    *,
    bandwidth_mbps: float | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Connect]:
    """Run shards as threads over a memory network; clients have a budget under `SSPAggr`."""
    network = MemoryNetwork(shards, faults)
    servers = [Server(Shard(i, workers, TOKEN), network.server(i)) for i in range(shards)]

    def connect(rank: int, store: StoreSpec) -> Client:
        return Client(
            network.client(f"worker {rank}"),
            Network(rank=rank, size=store.workers, token=TOKEN, timeout_s=timeout_s),
            store=store,
            bandwidth_mbps=bandwidth_mbps,
        )

    with serving(servers):
        yield connect


@contextmanager
def shards_on_sockets(workers: int, shards: int) -> Iterator[list[str]]:
    """Run shards as threads over ZeroMQ on loopback. Yield their addresses."""
    servers = [
        Server(Shard(i, workers, TOKEN), ZmqServerTransport("tcp://127.0.0.1:0"))
        for i in range(shards)
    ]
    with serving(servers):
        yield [server.address for server in servers]


class Addresses:
    """Exchanges addresses among workers that are threads of this process.

    Args:
        hosts: the number of workers that report theirs.
        shards: the shards' addresses; None: there are none, and workers get each other's.
    """

    def __init__(self, hosts: int, shards: Sequence[str] | None) -> None:
        self._hosts = hosts
        self._shards = shards
        self._reported: defaultdict[tuple[int, int], Future[str]] = defaultdict(Future)
        self._rounds: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __call__(self, own: str) -> Sequence[str]:
        assert self._shards is not None, "without shards each worker has its own: `of`"
        return self._shards

    def of(self, rank: int) -> Callable[[str], Sequence[str]]:
        """Return the part of a worker, by its rank among those that report."""
        return self if self._shards is not None else partial(self._exchange, rank)

    def _exchange(self, rank: int, own: str) -> Sequence[str]:
        if not own:
            return ()
        with self._lock:
            number = self._rounds[rank]
            self._rounds[rank] += 1
            found = [self._reported[number, other] for other in range(self._hosts)]
        found[rank].set_result(own)
        return [each.result(TIMEOUT_S) for each in found]


@contextmanager
def job_addresses(kind: ExchangeKind, workers: int, shards: int) -> Iterator[Addresses]:
    """Run shards where the exchange has any. Yield what exchanges addresses among the workers."""
    if kind.has_shards:
        with shards_on_sockets(workers, shards) as addresses:
            yield Addresses(workers, addresses)
        return
    yield Addresses(workers, None)


@contextmanager
def socket_store(
    workers: int, shards: int, *, bandwidth_mbps: float | None = None, share_memory: bool = True
) -> Iterator[Connect]:
    """Run a store on such shards; clients have a budget under `SSPAggr`, and share memory with
    shards or not.
    """
    with shards_on_sockets(workers, shards) as addresses:

        def connect(rank: int, store: StoreSpec) -> Client:
            return Client(
                addresses,
                Network(rank=rank, size=store.workers, token=TOKEN, timeout_s=TIMEOUT_S),
                store=store,
                bandwidth_mbps=bandwidth_mbps,
                share_memory=share_memory,
            )

        yield connect


@contextmanager
def serving(servers: Sequence[Server]) -> Iterator[None]:
    threads = [
        threading.Thread(target=server.serve, name=f"ps-shard-{i}")
        for i, server in enumerate(servers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.stop()
        for thread in threads:
            thread.join()


def run_workers(connect: Connect, store: StoreSpec, body: WorkerBody) -> None:
    """Run `body(client, rank)` on a thread per worker; raise the first failure."""

    def run(rank: int) -> None:
        client = connect(rank, store)
        try:
            body(client, rank)
        finally:
            client.close()

    on_threads(store.workers, run)


def zeros(store: StoreSpec) -> Callable[[int], list[Array]]:
    """Return initial values of zero."""
    return lambda table: [np.zeros(store.tables[table].size, dtype=np.float32)]
