"""A store of S shards and W workers in one process: threads over the memory transport, or over
sockets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from poseidon.exchange.kinds import ExchangeKind
from ps_server import Client, Server, Shard, StoreSpec, ZmqServerTransport
from ps_server.network import Network
from ps_server.protocol.messages import Array
from ps_server.transport.memory import Faults, MemoryNetwork

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


@contextmanager
def job_addresses(
    kind: ExchangeKind, workers: int, shards: int
) -> Iterator[Callable[[str], Sequence[str]]]:
    """Run shards where the exchange has any.

    Yield what exchanges addresses among the workers, threads of this process.
    """
    if kind.has_shards:
        with shards_on_sockets(workers, shards) as addresses:
            yield lambda own: addresses
        return
    first: Future[str] = Future()

    def exchange(own: str) -> list[str]:
        if own:
            first.set_result(own)
        return [first.result(TIMEOUT_S)]

    yield exchange


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
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        client = connect(rank, store)
        try:
            body(client, rank)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)
        finally:
            client.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"ps-worker-{rank}")
        for rank in range(store.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def zeros(store: StoreSpec) -> Callable[[int], list[Array]]:
    """Return initial values of zero."""
    return lambda table: [np.zeros(store.tables[table].size, dtype=np.float32)]
