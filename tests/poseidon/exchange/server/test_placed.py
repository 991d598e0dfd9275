"""Small tensors in one table: weights, histories and statistics are as with a table each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.server.placed import (
    POOL_ELEMENTS,
    SMALL_TENSOR_ELEMENTS,
    pool_tensors,
    pools_of,
)
from poseidon.exchange.server.store import StoreLayout
from ps_server import Client, Consistency, NewtonSchulz, Rule, RuleKind
from ps_server.network import Network
from ps_server.protocol.messages import Array
from tests.poseidon.exchange.test_exchange_contract import server
from tests.support.cluster import Connect, memory_store, socket_store
from tests.support.exchange_contract import Make, Scenario, train
from tests.support.exchanges import exchange_of, plain_store

SETTINGS = ExchangeSettings()


def over(
    connect: Connect,
    shards: int,
    workers: int,
    *,
    staleness: int = 0,
    consistency: Consistency = Consistency.SSP_PUSH,
    apart: Sequence[int] = (),
) -> Make:
    """Makes exchanges whose small tensors share tables."""

    def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        options = ExchangeOptions(staleness=staleness, consistency=consistency)
        pools = pools_of(tensors, apart)
        pooled = pool_tensors(tensors, pools)
        store = plain_store(
            pooled,
            settings,
            Membership(network=Network(size=workers), shards=shards, options=options),
        )
        layout = StoreLayout(tensors=tensors, tables=store.tables, pools=pools, pooled=pooled)
        member = Membership(
            network=Network(rank=rank, size=workers), shards=shards, options=options
        )
        return exchange_of(connect(rank, store), layout, store, settings, member)

    return make


@contextmanager
def pooled(
    workers: int, shards: int, *, staleness: int = 0, apart: Sequence[int] = ()
) -> Iterator[Make]:
    with memory_store(workers, shards) as connect:
        yield over(connect, shards, workers, staleness=staleness, apart=apart)


def tensor(size: int, *, rate: float = 1.0, statistics: bool = False) -> Trained:
    return Trained(
        name="t", tensor=torch.zeros(size), rule=Rule(rate_factor=rate), statistics=statistics
    )


def test_only_small_tensors_of_one_rule_share() -> None:
    tensors = [
        tensor(SMALL_TENSOR_ELEMENTS + 1),
        tensor(10),
        tensor(SMALL_TENSOR_ELEMENTS),
        tensor(10, rate=2.0),
        tensor(10, statistics=True),
        tensor(20),
        tensor(30, rate=2.0),
        tensor(40),
    ]
    assert pools_of(tensors) == ((0,), (1, 2, 5, 7), (3, 6), (4,))
    second = replace(tensors[5], rate_index=1)
    assert pools_of([tensors[1], second, tensors[7]]) == ((0, 2), (1,))
    muon = Rule(kind=RuleKind.MUON, matrix=NewtonSchulz(columns=5))
    assert pools_of([replace(tensors[1], rule=muon)] * 2) == ((0,), (1,))
    assert pools_of(tensors, apart=(2, 3)) == ((0,), (1, 5, 7), (2,), (3,), (4,), (6,))


def test_a_full_pool_is_followed_by_another() -> None:
    count = POOL_ELEMENTS // SMALL_TENSOR_ELEMENTS
    tensors = [tensor(SMALL_TENSOR_ELEMENTS) for _ in range(2 * count + 1)]
    pools = pools_of(tensors)
    assert [len(pool) for pool in pools] == [count, count, 1]
    assert [index for pool in pools for index in pool] == list(range(len(tensors)))


def test_a_pool_has_the_values_in_order() -> None:
    tensors = [
        Trained(name="a", tensor=torch.ones(2, 3)),
        Trained(name="b", tensor=torch.full((2,), 2.0)),
    ]
    (only,) = pool_tensors(tensors, [(0, 1)])
    assert only.name == "a and 1 more"
    assert only.tensor.tolist() == [1, 1, 1, 1, 1, 1, 2, 2]
    assert pool_tensors(tensors, [(0,), (1,)]) == tensors


@pytest.mark.parametrize("apart", [(), (0, 5)])
def test_the_bits_are_those_of_a_table_each(apart: Sequence[int]) -> None:
    scenario = Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, decay=0.01))
    with server(3, 2) as make:
        alone = train(make, 3, scenario)
    with pooled(3, 2, apart=apart) as make:
        together = train(make, 3, scenario)
    for a, b in zip(alone[0], together[0], strict=True):
        assert np.array_equal(a, b)


def sum_up(exchange: Exchange, tensors: Sequence[Trained], iterations: int) -> None:
    """Whole numbers as gradients, others in each iteration; what is read holds all that this
    worker has done.
    """
    exchange.open(None)
    for iteration in range(iterations):
        exchange.start(iteration, 1.0)
        for index, trained in enumerate(tensors):
            exchange.wait(index)
            assert trained.tensor[0] <= -sum(range(iteration)) * (index + 1)
            exchange.begin(index, torch.full_like(trained.tensor, 2.0 * iteration * (index + 1)))
        exchange.finish()
    exchange.settle()


@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "sockets"])
def test_what_a_budget_keeps_back_is_not_overwritten_by_the_next_gradients(sockets: bool) -> None:
    ends: dict[int, list[list[float]]] = {}
    make_store = socket_store if sockets else memory_store

    def body(rank: int, connect: Connect) -> None:
        tensors = [tensor(3), tensor(5)]
        make = over(connect, 2, 2, staleness=3, consistency=Consistency.SSP_AGGR)
        exchange = make(rank, tensors, SETTINGS)
        try:
            sum_up(exchange, tensors, 9)
            ends[rank] = [trained.tensor.tolist() for trained in tensors]
        finally:
            exchange.close()

    with make_store(2, 2, bandwidth_mbps=1e-6) as connect:
        run_all(body, connect)
    for rank in range(2):
        assert ends[rank] == [[-72.0] * 3, [-144.0] * 5]


def run_all(body: Callable[[int, Connect], None], connect: Connect) -> None:
    """`body` of two workers, each on a thread."""
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(body, rank, connect) for rank in range(2)]:
            future.result()


@pytest.mark.parametrize("clip", [None, 1e9])
def test_what_was_pushed_at_staleness_s_is_never_written_again(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[Array, Array]] = []
    push = Client.push

    def note(client: Client, table: int, array: Array, *, rate: float = 0.0) -> None:
        pushed.append((array, array.copy()))
        push(client, table, array, rate=rate)

    monkeypatch.setattr(Client, "push", note)
    tensors = [tensor(3), tensor(5)]
    with memory_store(1, 1) as connect:
        exchange = over(connect, 1, 1, staleness=2)(0, tensors, ExchangeSettings(clip=clip))
        try:
            sum_up(exchange, tensors, 5)
        finally:
            exchange.close()
    assert len(pushed) == 5
    assert all(np.array_equal(array, then) for array, then in pushed)


def test_histories_go_in_and_come_out_by_tensor() -> None:
    rule = Rule(kind=RuleKind.ADAM, momentum=0.5, momentum2=0.5)
    tensors = [Trained(name=f"t{size}", tensor=torch.ones(2, size), rule=rule) for size in (3, 4)]
    given = [[np.full((2, size), float(size + k), np.float32) for k in range(2)] for size in (3, 4)]
    with memory_store(1, 2) as connect:
        exchange = over(connect, 2, 1)(0, tensors, SETTINGS)
        try:
            exchange.open(given)
            exchange.start(0, 0.0)
            for index, trained in enumerate(tensors):
                exchange.wait(index)
                exchange.begin(index, torch.full_like(trained.tensor, 2.0))
            exchange.finish()
            exchange.settle()
            found = exchange.state.histories().values()
        finally:
            exchange.close()
    for size, (first, second) in zip((3, 4), found, strict=True):
        assert np.array_equal(first, np.full((2, size), 0.5 * size + 1, np.float32))
        assert np.array_equal(second, np.full((2, size), 0.5 * (size + 1) + 2, np.float32))


def test_statistics_share_and_take_the_mean() -> None:
    with memory_store(1, 1) as connect:
        tensors = [tensor(2, statistics=True), tensor(3, statistics=True)]
        exchange = over(connect, 1, 1)(0, tensors, SETTINGS)
        try:
            exchange.open(None)
            for iteration in range(3):
                exchange.start(iteration, 0.1)
                for index, trained in enumerate(tensors):
                    exchange.wait(index)
                    assert trained.tensor.tolist() == [iteration * (index + 1)] * (index + 2)
                    trained.tensor.add_(index + 1)
                exchange.finish()
            exchange.settle()
            assert tensors[1].tensor.tolist() == [6, 6, 6]
        finally:
            exchange.close()


def test_a_pools_bytes_are_its_tensors_by_their_sizes() -> None:
    with memory_store(1, 1) as connect:
        exchange = over(connect, 1, 1)(0, [tensor(100), tensor(300)], SETTINGS)
        try:
            exchange.open(None)
            exchange.start(0, 0.1)
            for index, size in enumerate((100, 300)):
                exchange.wait(index)
                exchange.begin(index, torch.ones(size))
            exchange.finish()
            exchange.settle()
            traffic = exchange.traffic()
        finally:
            exchange.close()
    assert traffic[1].bytes_out // 3 == traffic[0].bytes_out >= 400
