"""The builders of an exchange through the server, with the plan's store and the carriers, and of a
single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from poseidon.errors import UsageError
from poseidon.exchange.allreduce.carrier import AllReduceCarrier
from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.carrier import Carrier
from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.exchange import Built, Connect, Exchange
from poseidon.exchange.factors.carrier import FactorCarrier
from poseidon.exchange.job_control import AloneControl, LinksControl, ShardControl
from poseidon.exchange.lossy.low_rank_matrix import LowRank, factor_tables
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import Scheme
from poseidon.exchange.peers import Peers
from poseidon.exchange.server.carrier import Parts, ServerCarrier
from poseidon.exchange.server.placed import pool_tensors, pools_of
from poseidon.exchange.server.store import StoreLayout, store_spec, table_spec
from poseidon.exchange.turns import Turns
from ps_server import Client, CodecPair, Precision, StoreSpec
from ps_server.protocol.schedule import LinkPriority
from ps_server.trace import Tracer


@dataclass(frozen=True, slots=True)
class PlanePart:
    """The tensors of a plane, and how each travels."""

    tensors: Sequence[Trained]
    plan: ExchangePlan


@dataclass(frozen=True, slots=True)
class BuildArguments:
    """The arguments of `build_exchange`, and the plan: of one plane.

    Attributes:
        job: the membership of the job.
        planes: the parts of all planes, in order; the one of this worker is empty where it owns
            nothing.
        all_squares: see `Exchange`.
        takes_nodes: whether `begin` brings the sums of the nodes of a host, which its workers have
            added.
        shards: see `build_exchange`.
        joined: has measured the shards with a trial store; None: not connected.
    """

    tensors: Sequence[Trained]
    settings: ExchangeSettings
    connect: Connect
    trace: Tracer
    plan: ExchangePlan
    job: Membership
    planes: Sequence[PlanePart]
    joined: Client | None = None
    all_squares: Callable[[Sequence[float]], float] = math.fsum
    takes_nodes: bool = False
    shards: Sequence[Sequence[Trained]] = ()

    @property
    def member(self) -> Membership:
        """The membership of the plane."""
        return self.job.of_plane if self.job.shares_hosts else self.job

    @property
    def own(self) -> PlanePart:
        """The part of this worker's plane."""
        own = self.planes[self.job.seat.local_rank :]
        return own[0] if own else PlanePart((), ExchangePlan(choices=()))

    def turns(
        self,
        tensors: Sequence[Trained],
        *,
        leaves: frozenset[int] = frozenset(),
        in_parts: bool = False,
    ) -> Turns | None:
        """Return the turns of this process's virtual workers; None: it takes none."""
        placed = self.member.placed
        if placed.is_one_each or self.takes_nodes:
            return None
        return Turns(tensors, placed, self.member.network.rank, leaves=leaves, in_parts=in_parts)

    def client(
        self, store: StoreSpec, *, table_clocks: bool = False, memory_for: StoreSpec | None = None
    ) -> Client:
        """Connect to the shards.

        A connection that has measured them takes the store in place of its trial.
        """
        if self.joined is not None:
            self.joined.replace_trial(store)
            return self.joined
        return Client(
            self.connect(""),
            self.job.network,
            store,
            bandwidth_mbps=self.member.options.bandwidth_mbps,
            table_clocks=table_clocks,
            memory_for=memory_for,
            trace=self.trace,
        )


def layouts_of(
    arguments: BuildArguments, *, shares_tables: bool = True
) -> tuple[StoreLayout, StoreSpec, Sequence[StoreLayout]]:
    """Return the tables of this worker's plane, the store, and the tables of all planes. Small
    tensors that go through the server may share some.
    """
    layouts: list[StoreLayout] = []
    for plane, part in enumerate(arguments.planes):
        first = sum(len(layout.tables) for layout in layouts)
        layouts.append(_layout_of(part, plane, first, arguments, shares_tables=shares_tables))
    store = store_spec([layout.tables for layout in layouts], arguments.settings, arguments.job)
    rank = arguments.job.seat.local_rank
    if rank < len(layouts):
        return layouts[rank], store, layouts
    empty = StoreLayout(tensors=(), tables=(), pools=(), pooled=(), first=len(store.tables))
    return empty, store, layouts


def _layout_of(
    part: PlanePart, plane: int, first: int, arguments: BuildArguments, *, shares_tables: bool
) -> StoreLayout:
    tensors, plan, options = part.tensors, part.plan, arguments.job.options
    low_rank = low_rank_of(plan, arguments.settings)
    codecs = [choice.codec for choice in plan.choices]
    elsewhere = frozenset(plan.of(Scheme.FACTORS) + plan.of(Scheme.ALLREDUCE))
    copies = elsewhere | low_rank.keys()
    pools: Sequence[Sequence[int]] = [(index,) for index in range(len(tensors))]
    # tables that are to be cut into so many pieces are not shared
    if shares_tables and not options.rows:
        pools = pools_of(
            tensors,
            apart=copies
            | {i for i, codec in enumerate(codecs) if codec is not None}
            | {i for i, t in enumerate(tensors) if t.tensor.dtype is not torch.float32},
        )
    pooled, tables = pool_tensors(tensors, pools), []
    factors = factor_tables(tensors, low_rank)
    for shared in factors:  # P and Q come first: their two rounds are the longest way
        codec = shared.how.codec
        pairs = [None if codec is None else CodecPair(codec, codec)] * 2
        for held, pair in zip_longest(shared.held, pairs):
            tables.append(table_spec(held, options, codec=pair, plane=plane))
    for held, pool in zip(pooled, pools, strict=True):
        tables.append(
            table_spec(
                held,
                options,
                is_copy=pool[0] in copies,
                codec=codecs[pool[0]],
                parts=tuple(tensors[i].tensor.numel() for i in pool) if len(pool) > 1 else (),
                plane=plane,
            )
        )
    return StoreLayout(
        tensors=tensors,
        tables=tables,
        pools=pools,
        pooled=[*(held for shared in factors for held in shared.held), *pooled],
        elsewhere=elsewhere,
        factors=factors,
        first=first,
    )


def build_server(arguments: BuildArguments, parts: Parts = Parts.WHOLE) -> Built:
    """Build the exchange through the shards, with factors and all-reduce where the plan has them.
    Tensors share no tables where only some of them take part in an iteration.
    """
    in_parts = parts is not Parts.WHOLE
    layout, store, layouts = layouts_of(arguments, shares_tables=not in_parts)
    client = arguments.client(store, table_clocks=in_parts)
    exchange = through_server(client, layout, store, arguments, parts)
    return Built(
        exchange=exchange,
        plan=arguments.plan,
        store=store,
        tables=[own for each in layouts for own in each.owners],
        encoded=layout.encoded(store) | layout.by_low_rank,
        client=client,
    )


def through_server(
    client: Client,
    layout: StoreLayout,
    store: StoreSpec,
    arguments: BuildArguments,
    parts: Parts = Parts.WHOLE,
) -> Exchange:
    """Return the exchange of a plane's tables, with carriers of the tensors that have other
    schemes.

    At staleness 0 a worker's pushes wait until its factors have left. Both need the link of its
    host. A push causes an addition on a shard; factors cause a product on every owner, which takes
    longer than the work for any other message. So products are computed while pushes and values
    travel. At staleness s > 0 factors of later iterations could delay pushes that other workers
    wait for, so both share the link.

    Args:
        layout: what the tables hold. Tensors elsewhere travel as factors, unless by all-reduce.
    """
    member, settings = arguments.member, arguments.settings
    of_plane = ShardControl(client, whole=False, ranks=member.network.ranks)
    by_allreduce = arguments.own.plan.of(Scheme.ALLREDUCE)
    by_factors = sorted(layout.elsewhere - set(by_allreduce))
    client.norm_parts = bool(by_factors) + bool(by_allreduce)
    carriers: list[Carrier] = [
        ServerCarrier(
            client,
            layout,
            store,
            settings,
            member=member,
            control=of_plane,
            parts=parts,
        )
    ]
    if by_factors:
        link = LinkPriority()
        if member.options.staleness == 0:
            client.yield_link(link)
        carriers.append(
            FactorCarrier(
                {index: layout.tensors[index] for index in by_factors},
                settings,
                member=member,
                control=of_plane,
                norms=client,
                link=link,
                trace=arguments.trace,
            )
        )
    if by_allreduce:
        carriers.append(
            AllReduceCarrier(
                {index: layout.tensors[index] for index in sorted(by_allreduce)},
                settings,
                member=member,
                peers=Peers(member.network),
                control=of_plane,
                norms=client,
            )
        )
    return Exchange(
        carriers,
        ShardControl(client),
        settings,
        turns=arguments.turns(
            layout.tensors,
            leaves=layout.encoded(store) | layout.by_low_rank,
            in_parts=parts is not Parts.WHOLE,
        ),
        interruption=member.network.interruption,
        all_squares=arguments.all_squares,
    )


def build_alone(arguments: BuildArguments, *, in_parts: bool = False) -> Built:
    """Build the exchange of a process that computes for all virtual workers of a job: any number of
    processes gets the same bits.

    Raises:
        UsageError: there are several virtual workers, and a tensor has a codec or few bits, which
            shards encode.
    """
    member, part, count = arguments.member, arguments.own, arguments.member.placed.count
    few_bits = member.options.precision is not Precision.FLOAT32
    if count > 1 and (few_bits or any(choice.is_compressed for choice in part.plan.choices)):
        raise UsageError(
            "a job on one host sends nothing, so with --compress or --wire_precision its virtual "
            "workers would not have the bits of several hosts; leave these flags out, or use a "
            "machinefile of two lines"
        )
    carrier = AloneCarrier(
        part.tensors,
        arguments.settings,
        in_parts=in_parts,
        virtual_workers=count,
        by_factors=frozenset(part.plan.of(Scheme.FACTORS)),
        is_only=arguments.all_squares is math.fsum,
    )
    exchange = Exchange(
        [carrier],
        AloneControl(),
        arguments.settings,
        turns=arguments.turns(part.tensors, in_parts=in_parts),
        interruption=member.network.interruption,
        all_squares=arguments.all_squares,
    )
    return Built(exchange=exchange, plan=arguments.plan)


def build_allreduce(arguments: BuildArguments) -> Built:
    """Build the exchange without shards. The workers of a plane sum; collections and requests go
    over the same connections, which are those of all workers.
    """
    member, job, part = arguments.member, arguments.job, arguments.own
    peers = Peers(job.network)
    members, control = peers, LinksControl(peers)
    of_plane = control
    if job.shares_hosts:
        members = peers.among(job.plane_ranks)
        of_plane = LinksControl(members, ranks=member.network.ranks)
    carrier = AllReduceCarrier(
        dict(enumerate(part.tensors)),
        arguments.settings,
        member=member,
        peers=members,
        control=of_plane,
        all_squares=arguments.all_squares,
    )
    try:
        peers.links.connect(arguments.connect(peers.links.address))
    except BaseException:
        carrier.close()
        raise
    exchange = Exchange(
        [carrier],
        control,
        arguments.settings,
        turns=arguments.turns(part.tensors),
        interruption=job.network.interruption,
    )
    return Built(exchange=exchange, plan=arguments.plan)


def low_rank_of(plan: ExchangePlan, settings: ExchangeSettings) -> dict[int, LowRank]:
    """Return the tensors of a plan that travel by PowerSGD.

    Raises:
        UsageError: there are some, and a limit of the gradients' norm.
    """
    found = {
        choice.index: choice.compression
        for choice in plan.choices
        if choice.is_compressed and isinstance(choice.compression, LowRank)
    }
    if found and settings.clip is not None:
        raise UsageError(
            "--compress=powersgd cannot be combined with clip_gradients or clip=; leave these "
            "out, or use a different compression (with --compress=auto a smaller loss budget)"
        )
    return found
