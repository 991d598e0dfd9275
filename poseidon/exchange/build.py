"""One worker's exchange, from what it is told about its job.

    alone                                    SingleProcessExchange
    hybrid, ps, svb: by the plan             HybridExchange, or ServerExchange where nothing travels as factors
    allreduce                                AllReduceExchange

Small tensors share tables on the server: a PooledExchange goes round either of the first two.

Where a machine has several workers, the first of them has that exchange, inside a LeaderExchange, and the others a
FollowerExchange each.

Law: every worker of a job makes the same plan and the same store, since both follow from what all are told alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from poseidon.errors import UsageError
from poseidon.exchange.allreduce import AllReduceExchange, meeting_store
from poseidon.exchange.base import Exchange, ExchangeSettings, Trained
from poseidon.exchange.cost import Choice, ExchangeKind, ExchangePlan, Scheme, Topology, choose
from poseidon.exchange.hybrid import HybridExchange
from poseidon.exchange.local.follower import FollowerExchange
from poseidon.exchange.local.group import LocalGroup
from poseidon.exchange.local.leader import LeaderExchange
from poseidon.exchange.observe.traffic import CountsTraffic
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions, OnDivergence
from poseidon.exchange.pooled import PooledExchange, lay_together, pools_of
from poseidon.exchange.ps import ServerExchange, store_spec
from poseidon.exchange.single import SingleProcessExchange
from ps_server import Client, StoreSpec
from ps_server.keys import Keyring
from ps_server.protocol.precision import pushed_in, sent_in
from ps_server.trace import NO_TRACE, Tracer

TIMEOUT_S = 600.0

Connect = Callable[[], Sequence[str]]
"""Waits for the shards' addresses and gives them, in shard order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What one worker is told about its job.

    Args:
        rank: this worker's machine, 0..workers-1.
        workers: number of machines with workers: of those who push.
        shards: number of shards; 0 for a worker that is alone.
        host: where this machine is reached by the others; an IPv6 address in brackets.
        token: the job's secret.
        keys: own pair, and those of all machines' workers and of the shards; None: all is in clear.
        homes: for each shard the working client on whose machine it runs, or -1 - j for serving machine j; empty:
            spread evenly over the working ones.
        loads: relative load of each shard; empty: all alike.
        timeout_s: longest time that any call waits.
        local_rank: this worker among those of its machine; 0 speaks for all of them.
        local_workers: workers on each machine.
        local_address: where the workers of this machine meet (`LocalGroup`).
        options: what the job asks of its exchange.
    """

    rank: int = 0
    workers: int = 1
    shards: int = 0
    host: str = "127.0.0.1"
    token: bytes = b""
    keys: Keyring | None = None
    homes: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    timeout_s: float = TIMEOUT_S
    local_rank: int = 0
    local_workers: int = 1
    local_address: str = ""
    options: ExchangeOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        if self.options.kind is ExchangeKind.LOCAL and self.workers > 1:
            raise UsageError(f"--exchange=local is for one worker; this job has {self.workers}")

    @property
    def alone(self) -> bool:
        """Whether there is no other machine to exchange anything with."""
        return self.shards == 0 or self.options.kind is ExchangeKind.LOCAL

    @property
    def private_histories(self) -> bool:
        """Whether each host has histories of its own, as `ExchangeState.private` of its exchange: rules run on workers."""
        return self.options.staleness > 0 and not self.alone

    @property
    def topology(self) -> Topology:
        """Who pushes, and who serves how much."""
        homes = self.homes or tuple(shard * self.workers // self.shards for shard in range(self.shards))
        return Topology.of_shards(self.workers, homes, self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An exchange, not yet opened, with what it was built from.

    Attributes:
        exchange: the exchange.
        plan: the way of each tensor.
        store: what workers and shards agree on; None for a worker that is alone.
        tables: the tensors of each table of the store, by their indices.
        client: this worker's connection to the shards; None for a worker that is alone.
        traffic: counts what the tensors cost; None where nothing does.
    """

    exchange: Exchange
    plan: ExchangePlan
    store: StoreSpec | None = None
    tables: Sequence[Sequence[int]] = ()
    client: Client | None = None
    traffic: CountsTraffic | None = None


def plan_exchange(tensors: Sequence[Trained], member: Membership) -> ExchangePlan:
    """The way of each tensor.

    Where every tensor would travel as factors, the one that loses least goes to the server: a request
    of rank 0 (`ShardDelivery`) is in step with training only where training reads from the shards.
    """
    options = member.options
    kind = ExchangeKind.LOCAL if member.alone else options.kind
    wire = (options.precision, options.consistency, options.staleness)
    plan = choose(tensors, kind, member.topology, gradients=pushed_in(*wire), values=sent_in(*wire))
    if not plan.of(Scheme.FACTORS) or plan.of(Scheme.SERVER):
        return plan
    cheapest = min(plan.choices, key=lambda choice: choice.server_bytes - choice.bytes)
    return ExchangePlan(choices=tuple(_served(c) if c is cheapest else c for c in plan.choices))


def _served(choice: Choice) -> Choice:
    return replace(choice, scheme=Scheme.SERVER)


def build_exchange(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    member: Membership,
    connect: Connect,
    *,
    trace: Tracer = NO_TRACE,
) -> Built:
    """Make one worker's exchange; connects to the shards, where there are any.

    Args:
        tensors: what to keep together, the same on every worker.
        settings: common to all tensors.
        member: this worker and its job.
        connect: waits for the shards' addresses.
        trace: told what is sent and received.

    Raises:
        TransportError: an address cannot be reached or listened on.
    """
    if member.local_workers > 1:
        return _build_local_group(tensors, settings, member, connect, trace)
    settings = replace(settings, mends=member.options.on_divergence is OnDivergence.MEND)
    plan = plan_exchange(tensors, member)
    if member.alone:
        return Built(exchange=SingleProcessExchange(tensors, settings), plan=plan)
    by_factors = plan.of(Scheme.FACTORS)
    pools = _pools(tensors, member, by_factors)
    laid = lay_together(tensors, pools)
    copies = [table for table, pool in enumerate(pools) if pool[0] in by_factors]
    store = _store(laid, settings, member, copies)
    client = Client(
        connect(),
        rank=member.rank,
        store=store,
        token=member.token,
        keys=member.keys,
        timeout_s=member.timeout_s,
        bandwidth_mbps=member.options.bandwidth_mbps,
        trace=trace,
    )
    exchange: AllReduceExchange | HybridExchange | PooledExchange | ServerExchange
    if member.options.kind is ExchangeKind.ALLREDUCE:
        exchange = AllReduceExchange(
            client,
            tensors,
            settings,
            rank=member.rank,
            workers=member.workers,
            host=member.host.strip("[]"),
            timeout_s=member.timeout_s,
        )
    elif by_factors:
        exchange = HybridExchange(
            client,
            laid,
            store,
            settings,
            listen=f"tcp://{member.host}:0",
            token=member.token,
            keys=member.keys,
            timeout_s=member.timeout_s,
            trace=trace,
        )
    else:
        exchange = ServerExchange(client, laid, store, settings)
    if len(pools) < len(tensors):
        exchange = PooledExchange(exchange, exchange, tensors, pools, laid)
    return Built(exchange=exchange, plan=plan, store=store, tables=pools, client=client, traffic=exchange)


def _pools(
    tensors: Sequence[Trained], member: Membership, by_factors: Sequence[int]
) -> Sequence[Sequence[int]]:
    """Which tensors share a table: none where the workers use no tables, or tables are to be cut into so many pieces."""
    if member.options.kind is ExchangeKind.ALLREDUCE or member.options.rows:
        return [(index,) for index in range(len(tensors))]
    return pools_of(tensors, apart=by_factors)


def _build_local_group(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    member: Membership,
    connect: Connect,
    trace: Tracer,
) -> Built:
    """One worker of a machine with several; factors of all of them leave together."""
    group = LocalGroup(
        address=member.local_address,
        rank=member.local_rank,
        workers=member.local_workers,
        timeout_s=member.timeout_s,
    )
    machine = [replace(t, factor_rows=t.factor_rows * group.workers) for t in tensors]
    one = replace(member, local_rank=0, local_workers=1)
    if group.rank:
        return Built(exchange=FollowerExchange(tensors, group), plan=plan_exchange(machine, one))
    built = build_exchange(machine, settings, one, connect, trace=trace)
    return replace(built, exchange=LeaderExchange(built.exchange, tensors, group))


def _store(
    laid: Sequence[Trained], settings: ExchangeSettings, member: Membership, by_factors: Sequence[int]
) -> StoreSpec:
    if member.options.kind is ExchangeKind.ALLREDUCE:
        return meeting_store(settings, workers=member.workers, shards=member.shards)
    return store_spec(
        laid,
        settings,
        workers=member.workers,
        shards=member.shards,
        options=member.options,
        loads=member.loads,
        by_factors=by_factors,
    )
