"""Workers and shards with row tables, on threads: exactness, staleness, and a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ps_server import Client, Server, Shard, StoreSpec, ZmqServerTransport
from ps_server.errors import PeerLeft
from ps_server.keys import JobKeys
from ps_server.network import Network
from ps_server.protocol.messages import Array, RowIds
from ps_server.protocol.row_settings import RowInit, RowRule, RowRuleKind, RowTableSpec
from ps_server.row_rules import first_values
from tests.support.cluster import (
    TIMEOUT_S,
    Connect,
    memory_store,
    run_workers,
    serving,
    socket_store,
)
from tests.support.memory_transport import Faults

WORKERS, ROWS, DIM = 3, 40, 4
ADAM = RowRule(kind=RowRuleKind.ADAM)
SPEC = RowTableSpec(name="users", rows=ROWS, dim=DIM, rule=ADAM, init=RowInit.NORMAL, seed=1)
ALL = np.arange(ROWS, dtype=np.uint32)
Results = dict[int, bytes]


def store(shards: int) -> StoreSpec:
    return StoreSpec(workers=WORKERS, shards=shards, tables=())


def lookups(rank: int, step: int) -> RowIds:
    """The rows of a worker's batch; every seventh is of padding only, and row 7 is never one."""
    random = np.random.default_rng([rank, step])
    size = 0 if (rank + step) % 7 == 0 else 6
    drawn = random.integers(0, ROWS, size)
    return np.unique(drawn[drawn != 7]).astype(np.uint32)


def gradient(rank: int, rows: RowIds, value: Array) -> Array:
    target = np.sin(rows.astype(np.float32) + rank)[:, None]
    return (value - target).astype(np.float32)


def train(client: Client, table: int, rank: int, steps: range, *, ahead: bool) -> Array:
    """Train for some steps. Return all rows after the steps of all workers."""
    rows = client.rows
    number = rows.request(table, lookups(rank, steps[0]))
    for step in steps:
        named = lookups(rank, step)
        value = rows.read(number)
        if ahead:
            number = rows.request(table, lookups(rank, step + 1), ahead=1)
        rows.push(table, named, gradient(rank, named, value), rate=0.05)
        if not ahead:
            number = rows.request(table, lookups(rank, step + 1))
    rows.forget(number)
    return rows.read(rows.request(table, ALL, staleness=0))


def trained(connect: Connect, shards: int, *, ahead: bool = True, steps: int = 40) -> Results:
    ends: Results = {}

    def body(client: Client, rank: int) -> None:
        client.start(lambda _: [])
        table = client.rows.create(SPEC)
        ends[rank] = train(client, table, rank, range(steps), ahead=ahead).tobytes()
        client.barrier()

    run_workers(connect, store(shards), body)
    return ends


@torch.sparse.check_sparse_tensor_invariants()
def one_process(steps: int) -> Array:
    """The table of a process that has all batches, by torch.optim.SparseAdam."""
    value = torch.nn.Parameter(torch.from_numpy(first_values(SPEC.init, 1.0, 1, ALL, DIM)))
    optimizer = torch.optim.SparseAdam([value], lr=0.05)
    for step in range(steps):
        parts = []
        for rank in range(WORKERS):
            rows = lookups(rank, step)
            g = gradient(rank, rows, value.detach().numpy()[rows]) / WORKERS
            at = torch.from_numpy(rows.astype(np.int64))[None]
            parts.append(torch.sparse_coo_tensor(at, torch.from_numpy(g), (ROWS, DIM)))
        value.grad = (parts[0] + parts[1] + parts[2]).coalesce()
        optimizer.step()
    return value.detach().numpy()


@contextmanager
def encrypted_store(workers: int, shards: int) -> Iterator[Connect]:
    """Run a store on sockets with keys."""
    keys = JobKeys.new(workers=workers, shards=shards)
    servers = [
        Server(Shard(i, workers), ZmqServerTransport("tcp://127.0.0.1:0", keys.of_shard(i)))
        for i in range(shards)
    ]

    def connect(rank: int, store: StoreSpec) -> Client:
        network = Network(rank=rank, size=workers, keys=keys.of_worker(rank), timeout_s=TIMEOUT_S)
        return Client([server.address for server in servers], network, store)

    with serving(servers):
        yield connect


@pytest.mark.parametrize("open_store", [memory_store, encrypted_store])
def test_workers_are_one_process_with_sparse_adam(open_store: Callable[..., object]) -> None:
    with open_store(WORKERS, 2) as connect:  # type: ignore[attr-defined]
        ends = trained(connect, 2)
    assert ends[0] == ends[1] == ends[2]
    found = np.frombuffer(ends[0], np.float32).reshape(ROWS, DIM)
    np.testing.assert_allclose(found, one_process(40), rtol=0, atol=1e-6)
    untouched = first_values(SPEC.init, 1.0, 1, ALL[7:8], DIM)
    assert found[7].tobytes() == untouched.tobytes()


def test_neither_delays_nor_shards_nor_prefetching_change_a_bit() -> None:
    found = set()
    for shards, faults, ahead in [
        (1, None, True),
        (2, None, False),
        (2, Faults(seed=1, delay=20), True),
        (3, Faults(seed=2, delay=20), False),
    ]:
        with memory_store(WORKERS, shards, faults) as connect:
            found |= set(trained(connect, shards, ahead=ahead, steps=12).values())
    assert len(found) == 1


def test_a_resumed_run_has_the_same_bits() -> None:
    kept: list[tuple[RowIds, list[Array]]] = []
    ends: Results = {}

    def first(client: Client, rank: int) -> None:
        client.start(lambda _: [])
        table = client.rows.create(SPEC)
        train(client, table, rank, range(10), ahead=False)
        kept.extend(client.rows.stored(table) if rank == 0 else ())
        client.barrier()
        ends[rank] = train(client, table, rank, range(10, 20), ahead=True).tobytes()
        client.barrier()

    def second(client: Client, rank: int) -> None:
        client.start(lambda _: [])
        client.rows.create(SPEC)
        table = client.rows.create(SPEC)
        client.rows.restore(table, 10, kept if rank == 0 else None)
        client.barrier()
        assert client.rows.clock(table) == 10
        end = train(client, table, rank, range(10, 20), ahead=False)
        assert end.tobytes() == ends[rank]
        client.barrier()

    with memory_store(WORKERS, 2) as connect:
        run_workers(connect, store(2), first)
    looked_up = {int(r) for step in range(10) for rank in range(3) for r in lookups(rank, step)}
    assert sorted(int(row) for rows, _ in kept for row in rows) == sorted(looked_up)
    with memory_store(WORKERS, 3) as connect:
        run_workers(connect, store(3), second)


def test_a_worker_that_goes_on_after_another_has_left_is_told() -> None:
    errors: list[BaseException] = []

    def body(client: Client, rank: int) -> None:
        client.start(lambda _: [])
        table = client.rows.create(SPEC)
        client.barrier()
        try:
            if rank == 0:
                train(client, table, rank, range(2), ahead=False)
        except PeerLeft as error:
            errors.append(error)

    with memory_store(WORKERS, 2) as connect:
        run_workers(connect, store(2), body)
    assert len(errors) == 1


def test_the_bytes_of_a_step() -> None:
    wide = RowTableSpec(name="items", rows=10_000_000, dim=16, rule=ADAM)
    bytes_of: dict[int, tuple[int, int, int]] = {}

    def body(client: Client, rank: int) -> None:
        client.start(lambda _: [])
        table, distinct = client.rows.create(wide), 0
        for step in range(3):
            random = np.random.default_rng([rank, step])
            rows = np.unique(random.integers(0, wide.rows, 5000)).astype(np.uint32)
            value = client.rows.read(client.rows.request(table, rows))
            client.rows.push(table, rows, value, rate=0.1)
            distinct += len(rows)
        client.rows.read(client.rows.request(table, ALL[:0]))
        (found,) = client.statistics().row_tables
        assert found.name == "items"
        bytes_of[rank] = distinct, found.bytes_out, found.bytes_in
        client.barrier()

    with socket_store(WORKERS, 2, share_memory=False) as connect:
        run_workers(connect, store(2), body)
    for distinct, bytes_out, bytes_in in bytes_of.values():
        assert distinct * (8 + 4 * 16) <= bytes_out <= 1.1 * distinct * (4 + 4 * 16)
        assert distinct * 4 * 16 <= bytes_in <= 1.1 * distinct * (4 + 4 * 16)
