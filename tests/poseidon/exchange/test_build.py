"""Which exchange a worker gets, and that all workers agree on the plan."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from poseidon.exchange.allreduce.carrier import AllReduceCarrier
from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange, plan_exchange
from poseidon.exchange.exchange import Built
from poseidon.exchange.factors.carrier import FactorCarrier
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import WaitTimes
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from poseidon.exchange.server.carrier import ServerCarrier
from ps_server import Client, Consistency, Keeping, Precision, Rule
from ps_server.network import Network
from ps_server.protocol.messages import Array
from tests.support.cluster import TIMEOUT_S, TOKEN, Addresses, job_addresses, shards_on_sockets
from tests.support.exchanges import plain_store


def tensors(*, bias: bool = True, rows: int = 8) -> list[Trained]:
    weight = Trained(name="fc.0", tensor=nn.Parameter(torch.zeros(64, 100)), factor_rows=rows)
    small = Trained(name="fc2.0", tensor=nn.Parameter(torch.zeros(2, 64)), factor_rows=rows)
    return (
        [weight, small, Trained(name="fc2.1", tensor=nn.Parameter(torch.zeros(2)))]
        if bias
        else [weight]
    )


@pytest.mark.parametrize(
    ("kind", "expected", "copies"),
    [
        (ExchangeKind.HYBRID, [ServerCarrier, FactorCarrier], 1),
        (ExchangeKind.FACTORS, [ServerCarrier, FactorCarrier], 2),
        (ExchangeKind.SERVER, [ServerCarrier], 0),
        (ExchangeKind.ALLREDUCE, [AllReduceCarrier], 0),
    ],
)
def test_a_kind_has_its_carriers(kind: ExchangeKind, expected: list[type], copies: int) -> None:
    with job_addresses(kind, 2, 2) as connect:
        built = _build_two(connect, ExchangeOptions(kind=kind, precision=Precision.FLOAT32, rows=1))
    assert all([type(c) for c in b.exchange.carriers] == expected for b in built)
    assert built[0].plan == built[1].plan
    store = built[0].store
    assert store == built[1].store
    assert (store is not None) == kind.has_shards
    assert sum(table.keeping is Keeping.COPY for table in (store.tables if store else ())) == copies


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        (ExchangeKind.HYBRID, [(Keeping.COPY, 6400), (Keeping.GRADIENTS, 130)]),
        (ExchangeKind.SERVER, [(Keeping.GRADIENTS, 6400), (Keeping.GRADIENTS, 130)]),
        (ExchangeKind.ALLREDUCE, []),
    ],
)
def test_small_tensors_share_a_table(kind: ExchangeKind, tables: list[tuple[Keeping, int]]) -> None:
    with job_addresses(kind, 2, 2) as connect:
        built = _build_two(connect, ExchangeOptions(kind=kind))
    assert [choice.name for choice in built[0].plan.choices] == ["fc.0", "fc2.0", "fc2.1"]
    store = built[0].store
    assert [(table.keeping, table.size) for table in (store.tables if store else ())] == tables


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (ExchangeOptions(kind=ExchangeKind.AUTO), True),
        (ExchangeOptions(kind=ExchangeKind.HYBRID), True),
        (ExchangeOptions(kind=ExchangeKind.HYBRID, precision=Precision.FLOAT16), True),
        (ExchangeOptions(kind=ExchangeKind.HYBRID, local_steps=2), False),
        (ExchangeOptions(kind=ExchangeKind.FACTORS), False),
    ],
)
def test_a_job_that_chooses_keeps_its_schemes(options: ExchangeOptions, kept: bool) -> None:
    """A later start may have other workers and shards, for which it would choose differently."""
    schemes = [Scheme.SERVER, Scheme.FACTORS, Scheme.SERVER]
    with job_addresses(options.kind, 2, 2) as connect:
        built = _build_two(connect, options, schemes)
    assert [[choice.scheme for choice in b.plan.choices] == schemes for b in built] == [kept] * 2
    assert kept <= all(b.recorded for b in built)


def _build_two(
    connect: Addresses, options: ExchangeOptions, schemes: Sequence[Scheme] = ()
) -> list[Built]:
    """Build the exchanges of two workers, and close them."""

    def build_one(rank: int) -> Built:
        network = Network(rank=rank, size=2, token=TOKEN, timeout_s=TIMEOUT_S)
        member = Membership(network=network, shards=2, options=options)
        built = build_exchange(
            tensors(), ExchangeSettings(), member, connect.of(rank), schemes=schemes
        )
        built.exchange.close()
        return built

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(build_one, range(2)))


def test_a_workers_budget_makes_it_send_less_and_loses_nothing() -> None:
    sent = {}
    for budget in (None, 1e-6):
        with shards_on_sockets(2, 1) as addresses, ThreadPoolExecutor(2) as pool:
            trained = [Trained(name="w", tensor=torch.zeros(300)) for _ in range(2)]
            futures = [
                pool.submit(_add_up, trained[rank], _budgeted(rank, budget), addresses)
                for rank in range(2)
            ]
            sent[budget] = [future.result() for future in futures]
        assert all(one.tensor.tolist() == [-12.0] * 300 for one in trained)
    assert all(less < more / 2 for less, more in zip(sent[1e-6], sent[None], strict=True))


@pytest.mark.parametrize(
    ("homes", "one_machine", "chunks"),
    [((), False, 12), ((0, 1), False, 12), ((0, 1, -1), False, 24), ((0, 1, -1), True, 1)],
)
def test_links_decide_how_fine_a_shards_part_is_cut(
    homes: tuple[int, ...], one_machine: bool, chunks: int
) -> None:
    member = Membership(
        network=Network(size=2), shards=len(homes) or 2, homes=homes, one_machine=one_machine
    )
    assert plain_store([], ExchangeSettings(), member).chunks == chunks


def _budgeted(rank: int, budget: float | None) -> Membership:
    return Membership(
        network=Network(rank=rank, size=2, token=TOKEN, timeout_s=TIMEOUT_S),
        shards=1,
        options=ExchangeOptions(
            kind=ExchangeKind.SERVER,
            staleness=4,
            consistency=Consistency.SSP_AGGR,
            bandwidth_mbps=budget,
        ),
    )


def _add_up(trained: Trained, member: Membership, addresses: list[str]) -> int:
    """Twelve iterations with a gradient of ones; the bytes that left."""
    built = build_exchange([trained], ExchangeSettings(), member, lambda own: addresses)
    exchange = built.exchange
    try:
        exchange.open(None)
        for iteration in range(12):
            exchange.start(iteration, 1.0)
            exchange.wait(0)
            exchange.begin(0, torch.ones(300))
            exchange.finish()
        exchange.settle()
        return exchange.traffic()[0].bytes_out
    finally:
        exchange.close()


def test_a_worker_that_is_alone_has_no_server() -> None:
    built = build_exchange(tensors(), ExchangeSettings(), Membership(), list)
    assert [type(c) for c in built.exchange.carriers] == [AloneCarrier]
    assert built.store is None
    assert set(built.plan.of(Scheme.LOCAL)) == {0, 1, 2}


def test_one_tensor_always_reads_from_the_server_so_that_signals_are_in_step() -> None:
    plan = plan_exchange(
        tensors(bias=False),
        Membership(
            network=Network(size=2), shards=1, options=ExchangeOptions(kind=ExchangeKind.FACTORS)
        ),
    )
    assert [choice.scheme for choice in plan.choices] == [Scheme.SERVER]


def test_the_last_small_tensor_reads_from_the_server_where_all_others_travel_by_allreduce() -> None:
    """Its gradient comes first in a backward pass and its value is needed last, so no layer
    waits for it.
    """
    own = [
        Trained(name=name, tensor=torch.zeros(size), rule=Rule())
        for name, size in (("low.bias", 64), ("mid.bias", 512), ("high", 100_000))
    ]
    member = Membership(
        network=Network(size=2), shards=1, options=ExchangeOptions(kind=ExchangeKind.AUTO)
    )
    plan = plan_exchange(own, member, [Scheme.ALLREDUCE] * 3)
    assert [choice.scheme for choice in plan.choices] == [
        Scheme.ALLREDUCE,
        Scheme.SERVER,
        Scheme.ALLREDUCE,
    ]


def test_dedicated_servers_change_the_plan() -> None:
    both = Membership(network=Network(size=4), shards=4, homes=(0, 1, 2, 3))
    apart = Membership(network=Network(size=4), shards=4, homes=(-1, -2, -3, -4))
    rows = 16
    assert plan_exchange(tensors(rows=rows), both).choices[0].scheme is Scheme.FACTORS
    assert plan_exchange(tensors(rows=rows), apart).choices[0].scheme is Scheme.SERVER


@pytest.mark.parametrize(("staleness", "compress"), [(0, ""), (0, "fc.0=powersgd:2"), (2, "")])
def test_few_frames_lie_between_the_hook_of_a_gradient_and_its_push(
    staleness: int, compress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its work: what a gradient sends, the exchange, the carrier, the tables of the store,
    and what is sent to one of them.
    """
    kind = ExchangeKind.SERVER
    frames: set[tuple[str, ...]] = set()
    push = Client.push

    def noted(client: Client, table: int, array: Array, *, rate: float = 0.0) -> None:
        names = [
            f.name for f in traceback.extract_stack()[:-1] if "/poseidon/exchange/" in f.filename
        ]
        if "_on_gradient" in names:
            frames.add(tuple(names[names.index("_on_gradient") + 1 :]))
        push(client, table, array, rate=rate)

    monkeypatch.setattr(Client, "push", noted)
    module = nn.Linear(100, 64)
    own = [Trained(name=f"fc.{number}", tensor=p) for number, p in enumerate(module.parameters())]
    options = ExchangeOptions(kind=kind, staleness=staleness, compress=compress)
    member = Membership(
        network=Network(token=TOKEN, timeout_s=TIMEOUT_S), shards=1, options=options
    )
    with job_addresses(kind, 1, 1) as connect:
        exchange = build_exchange(own, ExchangeSettings(), member, connect.of(0)).exchange
        exchange.observe([WaitTimes(len(own))])
        hooks = Hooks([module], own, exchange)
        exchange.open(None)
        exchange.start(0, 0.1)
        hooks.start()
        module(torch.ones(1, 100)).sum().backward()
        hooks.finish()
        exchange.finish()
        exchange.settle()
        hooks.close()
        exchange.close()
    assert frames == {("_send", "begin", "begin", "push", "_send")}
