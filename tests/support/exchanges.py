"""Exchanges for tests: through a store with a table for each tensor, and one of a single process
to derive from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.cost import Choice, ExchangePlan
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import AloneControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions, Scheme
from poseidon.exchange.server.store import StoreLayout, store_spec, table_spec
from poseidon.exchange.server_exchange import BuildArguments, PlanePart, through_server
from ps_server import Client, Keeping, StoreSpec
from ps_server.network import Network
from ps_server.trace import NO_TRACE
from tests.support.cluster import TIMEOUT_S, TOKEN


def plain_exchange(
    client: Client,
    tensors: Sequence[Trained],
    store: StoreSpec,
    settings: ExchangeSettings,
    by_allreduce: Collection[int] = (),
) -> Exchange:
    """Return the exchange of a client whose store has a table for each tensor.

    Tensors of which the store has a copy travel as factors, or by all-reduce, on ports of their
    own.
    """
    staleness = max((table.staleness for table in store.tables), default=0)
    member = Membership(
        network=Network(rank=client.rank, size=store.workers, token=TOKEN, timeout_s=TIMEOUT_S),
        shards=store.shards,
        options=ExchangeOptions(staleness=staleness),
    )
    copies = (i for i, table in enumerate(store.tables) if table.keeping is Keeping.COPY)
    layout = StoreLayout(
        tensors=tensors,
        tables=store.tables,
        pools=[(index,) for index in range(len(tensors))],
        pooled=tensors,
        elsewhere=frozenset(copies),
    )
    return exchange_of(client, layout, store, settings, member, by_allreduce)


def exchange_of(
    client: Client,
    layout: StoreLayout,
    store: StoreSpec,
    settings: ExchangeSettings,
    member: Membership,
    by_allreduce: Collection[int] = (),
) -> Exchange:
    """Return the exchange of a client whose store has the tables of one layout."""

    def scheme(index: int) -> Scheme:
        elsewhere = Scheme.ALLREDUCE if index in by_allreduce else Scheme.FACTORS
        return elsewhere if index in layout.elsewhere else Scheme.SERVER

    choices = tuple(
        Choice(
            index=index,
            name=trained.name,
            shape=tuple(trained.tensor.shape),
            scheme=scheme(index),
            server_bytes=0,
            factor_bytes=0,
            allreduce_bytes=0,
        )
        for index, trained in enumerate(layout.tensors)
    )
    plan = ExchangePlan(choices=choices)
    arguments = BuildArguments(
        tensors=layout.tensors,
        settings=settings,
        connect=lambda _: (),
        trace=NO_TRACE,
        plan=plan,
        job=member,
        planes=[PlanePart(layout.tensors, plan)],
    )
    return through_server(client, layout, store, arguments)


def plain_store(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    member: Membership,
    *,
    copies: Collection[int] = (),
) -> StoreSpec:
    """Return the store with a table for each tensor, of one plane.

    Args:
        copies: indices of the tensors of which the shards only keep a copy.
    """
    tables = [
        table_spec(trained, member.options, is_copy=index in copies)
        for index, trained in enumerate(tensors)
    ]
    return store_spec([tables], settings, member)


class AloneExchange(Exchange):
    """The exchange of a single process; a test derives from it."""

    def __init__(self, tensors: Sequence[Trained], settings: ExchangeSettings) -> None:
        self.carrier = AloneCarrier(tensors, settings, is_only=True)
        super().__init__([self.carrier], AloneControl(), settings)
