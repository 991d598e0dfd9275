"""A store of hosts with several workers: its values are those of one worker a host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ps_server import (
    Client,
    CodecPair,
    Consistency,
    Keeping,
    LocalProtocolError,
    Precision,
    Rule,
    RuleKind,
    SignalKind,
    StoreSpec,
    TableSpec,
)
from ps_server.protocol.messages import Array
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers
from tests.support.cluster import memory_store, run_workers
from tests.support.memory_transport import Faults
from tests.support.sampling import sample

STEPS = 3
SIZES = (9000, 30, 20_000, 500, 4096)
ADAM = Rule(kind=RuleKind.ADAM, momentum=0.9)
HOSTS = [(2, 2), (3, 2), (1, 3)]
SEEDS = range(4)


def tables(planes: int, **more: object) -> tuple[TableSpec, ...]:
    """Return tables dealt to planes in turn."""
    return tuple(
        TableSpec(name=f"t{i}", size=size, plane=i % planes, **{"rule": ADAM, **more})  # type: ignore[arg-type]
        for i, size in enumerate(SIZES)
    )


def gradient(virtual_worker: int, table: int, step: int, size: int) -> Array:
    draw = np.random.default_rng([virtual_worker, table, step])
    return draw.standard_normal(size).astype(np.float32)


def push_all(client: Client, spec: StoreSpec, step: int) -> None:
    """Push the tables of a worker, the last one first: the sums of its host's nodes."""
    placed = spec.placed
    for index in reversed(client.own_tables):
        table = spec.tables[index]
        nodes = spec.nodes(table, client.host)
        tree = TreeSum[Array](placed.count, lambda left, right, _: left + right)
        for v in placed.of(client.host):
            node = tree.put(Node(v, v + 1), gradient(v, index, step, table.size))
            if node in nodes:
                client.push(index, tree.parts.pop(node), rate=0.1)
    client.clock()


def trained(spec: StoreSpec, seed: int, *, outside: Sequence[Sequence[float]] = ()) -> list[bytes]:
    """Return the values of all tables, which are equal on all workers that own one.

    Args:
        outside: numbers that each plane adds to the norm.
    """
    values = [np.linspace(-1, 1, table.size, dtype=np.float32) for table in spec.tables]
    found: list[dict[int, bytes]] = [{} for _ in range(spec.workers)]
    norms: list[list[float]] = [[] for _ in range(spec.workers)]

    def work(client: Client, rank: int) -> None:
        own = {index: np.zeros(spec.tables[index].size, np.float32) for index in client.own_tables}
        client.start(lambda index: [values[index]])
        for step in range(STEPS):
            for index, value in own.items():
                client.read(index, value)
            if client.host == 0 and spec.seats.of(rank).local_rank in spec.outside_norm:
                client.add_norm(step, outside[spec.seats.of(rank).local_rank])
            push_all(client, spec, step)
            if spec.seats.of(rank).local_rank in spec.outside_norm:
                norms[rank].append(client.total_norm(step))
        for index, value in own.items():
            client.read(index, value)
        client.barrier()
        found[rank] = {index: value.tobytes() for index, value in own.items()}

    with memory_store(spec.workers, spec.shards, Faults(seed=seed, delay=20)) as connect:
        run_workers(connect, spec, work)
    merged: dict[int, bytes] = {}
    for own in found:
        assert all(merged.setdefault(index, value) == value for index, value in own.items())
    totals = [norm for norm in norms if norm]
    assert all(norm == totals[0] for norm in totals)
    return [merged[index] for index in range(len(values))] + [repr(totals[:1]).encode()]


STORES: dict[str, Callable[[int], dict[str, object]]] = {
    "plain": lambda planes: {},
    "clip": lambda planes: {"clip": 3.0},
    "SSP": lambda planes: {"consistency": Consistency.SSP},
    "SSPAggr": lambda planes: {"consistency": Consistency.SSP_AGGR},
    "bfloat16": lambda planes: {"precision": Precision.BFLOAT16},
    "int8": lambda planes: {"tables": tables(planes, codec=CodecPair.parse("int8")), "clip": 3.0},
    "topk": lambda planes: {"tables": tables(planes, codec=CodecPair.parse("topk:0.1/none"))},
    "averages": lambda planes: {"tables": tables(planes, keeping=Keeping.AVERAGE)},
    "means of rows": lambda planes: {
        "tables": tables(planes, rule=Rule(kind=RuleKind.MEAN), row_elements=3)
    },
}


@pytest.mark.parametrize(("name", "hosts"), sample(list(product(STORES, HOSTS)), every=2))
def test_values_are_those_of_one_worker_a_host(name: str, hosts: tuple[int, ...]) -> None:
    store, planes, count = STORES[name], min(hosts), len(hosts)
    alone = StoreSpec(workers=count, shards=2, **{"tables": tables(1), **store(1)})  # type: ignore[arg-type]
    expected = trained(alone, seed=0)
    for seed in SEEDS:
        spec = StoreSpec(
            workers=sum(hosts),
            hosts=hosts,
            shards=1 + seed % 3,
            **{"tables": tables(planes), **store(planes)},  # type: ignore[arg-type]
        )
        assert trained(spec, seed) == expected


def test_hosts_compute_for_virtual_workers() -> None:
    placed = VirtualWorkers((0, 3, 4))
    alone = StoreSpec(workers=2, shards=1, tables=tables(1), virtual_workers=placed)
    spec = replace(alone, workers=4, hosts=(2, 2), tables=tables(2))
    assert trained(spec, seed=1) == trained(alone, seed=0)


def test_the_norm_has_the_squares_of_all_planes_outside_the_store() -> None:
    outside = [[1e17, 3.0], [1.0, 1.0]]
    alone = StoreSpec(workers=2, shards=2, tables=tables(1), clip=3.0, outside_norm=(0,))
    expected = trained(alone, 0, outside=[[*outside[0], *outside[1]]])
    for seed in SEEDS:
        spec = replace(alone, workers=5, hosts=(3, 2), tables=tables(2), outside_norm=(0, 1))
        assert trained(spec, seed, outside=outside) == expected


@pytest.mark.parametrize(
    ("hosts", "consistency", "seed"),
    sample(list(product([(2, 2), (3, 2)], Consistency, SEEDS)), every=5),
)
def test_each_plane_keeps_the_bound_by_itself(
    hosts: tuple[int, ...], consistency: Consistency, seed: int
) -> None:
    """Host h adds 1 to element h of each table in each iteration. Plane 1 goes ahead of plane 0."""
    bound, steps, count = 2, 9, len(hosts)
    two = tuple(
        TableSpec(name=f"t{plane}", size=count, staleness=bound, plane=plane) for plane in range(2)
    )
    spec = StoreSpec(workers=sum(hosts), hosts=hosts, shards=2, tables=two, consistency=consistency)
    ahead = threading.Event()

    def work(client: Client, rank: int) -> None:
        client.start(lambda index: [np.zeros(count, np.float32)])
        for index in client.own_tables:
            value = np.zeros(count, np.float32)
            if index == 0:
                assert ahead.wait(20)
            for step in range(steps):
                client.read(index, value)
                assert value[client.host] == step
                assert value.min() >= step - bound
                change = np.eye(count, dtype=np.float32)[client.host]
                value += change
                client.push(index, change)
                client.clock()
            client.read(index, value, staleness=0)
            assert value.tolist() == [steps] * count
            ahead.set()
        client.barrier()

    with memory_store(spec.workers, 2, Faults(seed=seed, delay=20), bandwidth_mbps=1.0) as connect:
        run_workers(connect, spec, work)


@pytest.mark.parametrize("seed", SEEDS)
def test_collections_of_all_and_of_planes_have_no_common_order(seed: int) -> None:
    hosts = (3, 2, 2)
    spec = StoreSpec(workers=7, hosts=hosts, shards=1, tables=tables(2))
    groups = {0: (0, 3, 5), 1: (1, 4, 6), 2: (2,)}

    def work(client: Client, rank: int) -> None:
        client.start(lambda index: [np.zeros(spec.tables[index].size, np.float32)])
        local = spec.seats.of(rank).local_rank
        kinds = [True, False] * 4 if (rank + local) % 2 else [False] * 4 + [True] * 4
        numbers = {True: 0, False: 0}
        started = []
        for whole in kinds:
            number = numbers[whole]
            numbers[whole] += 1
            keeps = number % 2 == 0 or rank == 0
            payload = b"%d of %d" % (number, rank)
            started.append((whole, number, keeps, client.gather(payload, keeps=keeps, whole=whole)))
        for whole, number, keeps, collection in started:
            members = range(7) if whole else groups[local]
            expected = tuple(b"%d of %d" % (number, other) for other in members)
            assert collection.result() == (expected if keeps else ())
        client.barrier()

    with memory_store(7, 1, Faults(seed=seed, delay=20)) as connect:
        run_workers(connect, spec, work)


def test_any_worker_reads_the_history_of_any_table() -> None:
    hosts = (3, 2)
    spec = StoreSpec(workers=5, hosts=hosts, shards=2, tables=tables(2))
    found: list[list[bytes]] = [[] for _ in range(5)]

    def work(client: Client, rank: int) -> None:
        client.start(lambda index: [np.zeros(spec.tables[index].size, np.float32)])
        push_all(client, spec, 0)
        for index in client.own_tables:
            client.read(index, np.zeros(spec.tables[index].size, np.float32))
        client.gather().result()
        histories = [client.history(index) for index in range(len(spec.tables))]
        found[rank] = [array.tobytes() for arrays in histories for array in arrays]
        client.gather().result()

    with memory_store(5, 2, Faults(seed=1, delay=20)) as connect:
        run_workers(connect, spec, work)
    assert all(histories == found[0] for histories in found)
    assert len(found[0]) == 2 * len(SIZES) and all(any(history) for history in found[0])


def test_a_store_is_renewed_and_a_trial_replaced_by_all_planes() -> None:
    hosts = (3, 2)
    spec = StoreSpec(workers=5, hosts=hosts, shards=2, tables=tables(2))
    trial = replace(spec, tables=tables(2)[2:4], trial=True)
    signals: list[list[int]] = [[] for _ in range(5)]

    def work(client: Client, rank: int) -> None:
        client.start(lambda index: [np.zeros(trial.tables[index].size, np.float32)])
        for step in range(
            1 + 3 * spec.seats.of(rank).local_rank
        ):  # planes end their trials at any time
            for index in client.own_tables:
                size = trial.tables[index].size
                client.push(index, gradient(rank, index, step, size), rate=0.1)
                client.read(index, np.zeros(size, np.float32))
        client.replace_trial(spec)
        client.start(lambda index: [np.zeros(spec.tables[index].size, np.float32)])
        if rank == 0:
            client.signal(SignalKind.STOP)
        client.renew(10)
        out = {index: np.zeros(spec.tables[index].size, np.float32) for index in client.own_tables}
        for index, array in out.items():
            client.bind(index, array)
        client.start(lambda index: [np.full(spec.tables[index].size, index, np.float32)])
        for index, array in out.items():
            client.read(index, array)
            assert set(array.tolist()) == {index}
        client.gather().result()
        signals[rank] = [signal.clock for signal in client.signals]

    with memory_store(5, 2, Faults(seed=2, delay=20)) as connect:
        run_workers(connect, trial, work)
    assert signals == [[13]] * 5


def test_a_worker_uses_the_tables_of_its_own_plane() -> None:
    spec = StoreSpec(workers=4, hosts=(2, 2), shards=1, tables=tables(2))
    with memory_store(4, 1) as connect:
        client = connect(3, spec)
        assert (client.rank, client.host, client.own_tables) == (3, 1, (1, 3))
        assert client.held_back(0) == {}
        out = np.zeros(SIZES[0], np.float32)
        calls: list[Callable[[], object]] = [
            lambda: client.push(0, out),
            lambda: client.skip(0),
            lambda: client.read(0, out),
            lambda: client.request(0),
            lambda: client.bind(0, out),
        ]
        for call in calls:
            with pytest.raises(LocalProtocolError, match="table 't0' belongs to plane 0; worker 3"):
                call()
        client.close(leave=False)
