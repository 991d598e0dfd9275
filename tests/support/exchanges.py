"""Exchanges for tests: through a store with a table for each tensor, and one of a single process
to derive from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.building.server_exchange import through_server
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.server.store import Layout
from ps_server import Client, Keeping, StoreSpec
from ps_server.network import Network
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
    layout = Layout(
        tensors=tensors,
        store=store,
        pools=[(index,) for index in range(len(tensors))],
        pooled=tensors,
        elsewhere=frozenset(copies),
    )
    by_allreduce = layout.elsewhere & set(by_allreduce)
    return through_server(client, layout, settings, member, by_allreduce=by_allreduce)


class AloneExchange(Exchange):
    """The exchange of a single process; a test derives from it."""

    def __init__(self, tensors: Sequence[Trained], settings: ExchangeSettings) -> None:
        self.carrier = AloneCarrier(tensors, settings)
        super().__init__([self.carrier], JobControl(self.carrier.delivery, root=True), settings)
