"""The builder of an exchange through the server: the plan's store, and the exchanges around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.building.membership import Built, Connect, Membership
from poseidon.exchange.cost import Choice, ExchangePlan, Scheme
from poseidon.exchange.factors.peers import PeerSettings
from poseidon.exchange.hybrid import HybridExchange
from poseidon.exchange.lossy.low_rank import LowRankExchange
from poseidon.exchange.lossy.low_rank_matrix import LowRank, low_rank_tensors
from poseidon.exchange.options import OnDivergence
from poseidon.exchange.pooled import PooledExchange, pool_tensors, pools_of
from poseidon.exchange.ps import ServerExchange, store_spec
from ps_server import Client, CodecPair, StoreSpec
from ps_server.trace import Tracer


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `build_exchange`, and the plan."""

    tensors: Sequence[Trained]
    settings: ExchangeSettings
    member: Membership
    connect: Connect
    trace: Tracer
    plan: ExchangePlan
    joined: Client | None = None
    """Has measured the shards with a trial store; None: not connected."""

    @property
    def equal_bits(self) -> bool:
        """Whether the job ends where the processors of the replicas compute different bits."""
        return self.member.options.on_divergence is OnDivergence.STOP

    def client(
        self, store: StoreSpec, *, table_clocks: bool = False, memory_for: StoreSpec | None = None
    ) -> Client:
        """Connect to the shards. A connection that has measured them takes the store in place of its trial."""
        if self.joined is not None:
            self.joined.replace_trial(store)
            return self.joined
        return Client(
            self.connect(""),
            rank=self.member.rank,
            store=store,
            token=self.member.token,
            keys=self.member.keys,
            timeout_s=self.member.timeout_s,
            bandwidth_mbps=self.member.options.bandwidth_mbps,
            table_clocks=table_clocks,
            memory_for=memory_for,
            trace=self.trace,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tables of a plan.

    Attributes:
        low_rank: the tensors that travel by PowerSGD.
        factors: the factors of each of these, which are tensors of the store.
        tensors: those factors, and the tensors of the job.
        pools: the tensors of each table.
        pooled: what each table holds.
        store: all tables.
        by_factors: tables of tensors that travel as factors.
        by_allreduce: tables of tensors that travel by all-reduce.
    """

    low_rank: dict[int, LowRank]
    factors: dict[int, list[Trained]]
    tensors: Sequence[Trained]
    pools: Sequence[Sequence[int]]
    pooled: Sequence[Trained]
    store: StoreSpec
    by_factors: Sequence[int]
    by_allreduce: Sequence[int]

    @property
    def owners(self) -> list[list[int]]:
        """For each table the indices of the job's tensors that it is of."""
        owners = [index for index, parts in self.factors.items() for _ in parts]
        owners += range(len(self.tensors) - len(owners))
        return [[owners[index] for index in pool] for pool in self.pools]


def layout_of(request: Request) -> Layout:
    """Return the tables of a plan. Small tensors that go through the server share some."""
    member, chosen = request.member, low_rank_of(request)
    factors = low_rank_tensors(request.tensors, chosen)
    parts = [part for own in factors.values() for part in own]
    first = len(parts)  # P and Q come first: their two rounds are the longest way
    tensors = [*parts, *request.tensors]
    codecs = [*_factor_codecs(factors, chosen), *map(codec_of, request.plan.choices)]
    by_factors = [first + index for index in request.plan.of(Scheme.FACTORS)]
    by_allreduce = [first + index for index in request.plan.of(Scheme.ALLREDUCE)]
    copies = [*by_factors, *by_allreduce, *(first + index for index in chosen)]
    pools: Sequence[Sequence[int]] = [(index,) for index in range(len(tensors))]
    if not member.options.rows:  # tables that are to be cut into so many pieces are not shared
        lossy = [index for index, codec in enumerate(codecs) if codec is not None]
        pools = pools_of(tensors, apart=[*range(first), *copies, *lossy])
    pooled = pool_tensors(tensors, pools)
    table = {pool[0]: place for place, pool in enumerate(pools)}
    store = store_spec(
        pooled,
        request.settings,
        workers=member.workers,
        shards=member.shards,
        options=member.options,
        loads=member.loads,
        copies=[table[index] for index in copies],
        codecs=[codecs[pool[0]] for pool in pools],
    )
    return Layout(
        low_rank=chosen,
        factors=factors,
        tensors=tensors,
        pools=pools,
        pooled=pooled,
        store=store,
        by_factors=[table[index] for index in by_factors],
        by_allreduce=[table[index] for index in by_allreduce],
    )


def build_server(request: Request) -> Built:
    """Build the exchange through the shards, with factors and all-reduce where the plan has them."""
    settings, member, layout = request.settings, request.member, layout_of(request)
    client = request.client(layout.store)
    exchange: HybridExchange | PooledExchange | ServerExchange | LowRankExchange
    if layout.by_factors or layout.by_allreduce:
        exchange = HybridExchange(
            client,
            layout.pooled,
            layout.store,
            settings,
            by_factors=layout.by_factors,
            by_allreduce=layout.by_allreduce,
            peers=PeerSettings(
                host=member.host,
                token=member.token,
                keys=member.keys,
                timeout_s=member.timeout_s,
                trace=request.trace,
            ),
            equal_bits=request.equal_bits,
        )
    else:
        exchange = ServerExchange(client, layout.pooled, layout.store, settings)
    if len(layout.pools) < len(layout.tensors):
        exchange = PooledExchange(exchange, exchange, layout.tensors, layout.pools, layout.pooled)
    if layout.low_rank:
        exchange = LowRankExchange(
            exchange,
            request.tensors,
            layout.factors,
            layout.low_rank,
            settings,
            equal_bits=request.equal_bits,
        )
    return Built(
        exchange=exchange,
        plan=request.plan,
        store=layout.store,
        tables=layout.owners,
        client=client,
        traffic=exchange,
    )


def _factor_codecs(
    factors: Mapping[int, Sequence[Trained]], chosen: Mapping[int, LowRank]
) -> list[CodecPair | None]:
    """Return the codecs of P and Q, and None for G, of each tensor that travels by PowerSGD."""
    found: list[CodecPair | None] = []
    for index, parts in factors.items():
        codec = chosen[index].codec
        pair = None if codec is None else CodecPair(codec, codec)
        found += [pair, pair, None][: len(parts)]
    return found


def low_rank_of(request: Request) -> dict[int, LowRank]:
    """Return the tensors that travel by PowerSGD.

    Raises:
        UsageError: there are some, and a limit of the gradients' norm.
    """
    found = {
        choice.index: choice.codec
        for choice in request.plan.choices
        if choice.is_compressed and isinstance(choice.codec, LowRank)
    }
    if found and request.settings.clip is not None:
        raise UsageError(
            "--compress=powersgd has no limit on the gradients' norm; expected no clip_gradients or clip=, another codec, "
            "or with --compress=auto a smaller loss budget"
        )
    return found


def codec_of(choice: Choice) -> CodecPair | None:
    return choice.codec if choice.is_compressed and isinstance(choice.codec, CodecPair) else None
