"""The builders of an exchange through the server, with the plan's store and the carriers, and of a
single process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from poseidon.errors import UsageError
from poseidon.exchange.allreduce.carrier import AllReduceCarrier
from poseidon.exchange.allreduce.peers import Peers
from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.building.built import Built, Connect
from poseidon.exchange.carrier import Carrier
from poseidon.exchange.cost import Choice, ExchangePlan
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.factors.carrier import FactorCarrier
from poseidon.exchange.job_control import JobControl, ShardDelivery
from poseidon.exchange.kinds import Scheme
from poseidon.exchange.lossy.low_rank_matrix import LowRank, factor_tables
from poseidon.exchange.membership import Membership
from poseidon.exchange.server.carrier import Parts, ServerCarrier
from poseidon.exchange.server.pool import pool_tensors, pools_of
from poseidon.exchange.server.store import Layout, store_spec
from poseidon.exchange.shared_norm import SharedNorm
from poseidon.exchange.turns import Turns
from ps_server import Client, CodecPair, Precision, StoreSpec
from ps_server.link import LinkPriority
from ps_server.protocol.virtual_workers import VirtualWorkers
from ps_server.trace import NO_TRACE, Tracer


@dataclass(frozen=True, slots=True)
class BuildArguments:
    """The arguments of `build_exchange`, and the plan."""

    tensors: Sequence[Trained]
    settings: ExchangeSettings
    member: Membership
    connect: Connect
    trace: Tracer
    plan: ExchangePlan
    joined: Client | None = None
    """Has measured the shards with a trial store; None: not connected."""

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
            self.member.network,
            store,
            bandwidth_mbps=self.member.options.bandwidth_mbps,
            table_clocks=table_clocks,
            memory_for=memory_for,
            trace=self.trace,
        )


def layout_of(arguments: BuildArguments, *, shares_tables: bool = True) -> Layout:
    """Return the tables of a plan. Small tensors that go through the server may share some."""
    tensors, plan, low_rank = arguments.tensors, arguments.plan, low_rank_of(arguments)
    codecs = [codec_of(choice) for choice in plan.choices]
    elsewhere = frozenset(plan.of(Scheme.FACTORS) + plan.of(Scheme.ALLREDUCE))
    copies = elsewhere | low_rank.keys()
    pools: Sequence[Sequence[int]] = [(index,) for index in range(len(tensors))]
    # tables that are to be cut into so many pieces are not shared
    if shares_tables and not arguments.member.options.rows:
        pools = pools_of(
            tensors,
            apart=copies
            | {i for i, codec in enumerate(codecs) if codec is not None}
            | {i for i, t in enumerate(tensors) if t.tensor.dtype is not torch.float32},
        )
    pooled = pool_tensors(tensors, pools)
    factors = factor_tables(tensors, low_rank)
    parts = [held for shared in factors for held in shared.held]
    of_parts: list[CodecPair | None] = []
    for shared in factors:
        codec = shared.how.codec
        pair = None if codec is None else CodecPair(codec, codec)
        of_parts += [pair, pair, *[None] * (len(shared.held) - 2)]
    sizes = {
        len(parts) + table: tuple(tensors[index].tensor.numel() for index in pool)
        for table, pool in enumerate(pools)
        if len(pool) > 1
    }
    store = store_spec(
        [*parts, *pooled],  # P and Q come first: their two rounds are the longest way
        arguments.settings,
        arguments.member,
        codecs=[*of_parts, *(codecs[pool[0]] for pool in pools)],
        copies={len(parts) + table for table, pool in enumerate(pools) if pool[0] in copies},
        parts=sizes,
    )
    return Layout(
        tensors=tensors,
        store=store,
        pools=pools,
        pooled=[*parts, *pooled],
        elsewhere=elsewhere,
        factors=factors,
    )


def build_server(arguments: BuildArguments, parts: Parts = Parts.WHOLE) -> Built:
    """Build the exchange through the shards, with factors and all-reduce where the plan has them.
    Tensors share no tables where only some of them take part in an iteration.
    """
    in_parts = parts is not Parts.WHOLE
    layout = layout_of(arguments, shares_tables=not in_parts)
    client = arguments.client(layout.store, table_clocks=in_parts)
    exchange = through_server(
        client,
        layout,
        arguments.settings,
        arguments.member,
        by_allreduce=arguments.plan.of(Scheme.ALLREDUCE),
        parts=parts,
        trace=arguments.trace,
    )
    return Built(
        exchange=exchange,
        plan=arguments.plan,
        store=layout.store,
        tables=layout.owners,
        encoded=layout.encoded,
        client=client,
    )


def through_server(
    client: Client,
    layout: Layout,
    settings: ExchangeSettings,
    member: Membership,
    *,
    by_allreduce: Collection[int] = (),
    parts: Parts = Parts.WHOLE,
    trace: Tracer = NO_TRACE,
) -> Exchange:
    """Return the exchange of a store, with carriers of the tensors that have other schemes.

    At staleness 0 a worker's pushes wait until its factors have left. Both need the link of its
    host. A push causes an addition on a shard; factors cause a product on every worker, which takes
    longer than the work for any other message. So products are computed while pushes and values
    travel. At staleness s > 0 factors of later iterations could delay pushes that other workers
    wait for, so both share the link.

    Args:
        layout: what the tables hold. Tensors elsewhere travel as factors, unless by all-reduce.
        by_allreduce: indices of tensors elsewhere that travel by all-reduce. Staleness 0.
    """
    control = JobControl(ShardDelivery(client), root=client.rank == 0)
    by_factors = sorted(layout.elsewhere - set(by_allreduce))
    norms = SharedNorm(client, ["factors"] * bool(by_factors) + ["all-reduce"] * bool(by_allreduce))
    carriers: list[Carrier] = [
        ServerCarrier(client, layout, settings, control, parts=parts, equal_bits=member.equal_bits)
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
                control=control,
                norms=norms,
                link=link,
                trace=trace,
            )
        )
    if by_allreduce:
        carriers.append(
            AllReduceCarrier(
                {index: layout.tensors[index] for index in sorted(by_allreduce)},
                settings,
                peers=Peers(member.network),
                control=control,
                workers=member.placed,
                norms=norms,
                equal_bits=member.equal_bits,
            )
        )
    return Exchange(
        carriers,
        control,
        settings,
        turns=_turns(layout, member, parts),
        interruption=member.network.interruption,
    )


def _turns(layout: Layout, member: Membership, parts: Parts) -> Turns | None:
    if member.placed.is_one_each:
        return None
    return Turns(
        layout.tensors,
        member.placed,
        member.network.rank,
        leaves=layout.encoded | layout.by_low_rank,
        in_parts=parts is not Parts.WHOLE,
    )


def build_alone(arguments: BuildArguments, *, in_parts: bool = False) -> Built:
    """Build the exchange of a process that computes for all virtual workers of a job: any number of
    processes gets the same bits.

    Raises:
        UsageError: there are several virtual workers, and a tensor has a codec or few bits, which
            shards encode.
    """
    member, plan, count = arguments.member, arguments.plan, arguments.member.placed.count
    few_bits = member.options.precision is not Precision.FLOAT32
    if count > 1 and (few_bits or any(choice.is_compressed for choice in plan.choices)):
        raise UsageError(
            "several virtual workers on one process without shards send nothing, so nothing is "
            "rounded or encoded, as it is on several processes; expected no --compress and no "
            "--wire_precision, or a job with shards (`poseidon run`)"
        )
    carrier = AloneCarrier(
        arguments.tensors,
        arguments.settings,
        in_parts=in_parts,
        virtual_workers=count,
        by_factors=frozenset(plan.of(Scheme.FACTORS)),
    )
    placed = VirtualWorkers((0, count))
    turns = Turns(arguments.tensors, placed, 0, in_parts=in_parts) if count > 1 else None
    exchange = Exchange(
        [carrier],
        JobControl(carrier.delivery, root=True),
        arguments.settings,
        turns=turns,
        interruption=member.network.interruption,
    )
    return Built(exchange=exchange, plan=plan)


def low_rank_of(arguments: BuildArguments) -> dict[int, LowRank]:
    """Return the tensors that travel by PowerSGD.

    Raises:
        UsageError: there are some, and a limit of the gradients' norm.
    """
    found = {
        choice.index: choice.compression
        for choice in arguments.plan.choices
        if choice.is_compressed and isinstance(choice.compression, LowRank)
    }
    if found and arguments.settings.clip is not None:
        raise UsageError(
            "--compress=powersgd has no limit on the gradients' norm; expected no clip_gradients "
            "or clip=, another compression, or with --compress=auto a smaller loss budget"
        )
    return found


def codec_of(choice: Choice) -> CodecPair | None:
    return (
        choice.compression
        if choice.is_compressed and isinstance(choice.compression, CodecPair)
        else None
    )
