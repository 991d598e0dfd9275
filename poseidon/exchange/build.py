"""The factory of exchanges: builds the exchange of one worker from its membership of a job.

    alone                                    SingleProcessExchange
    hybrid, ps, svb: by the plan             HybridExchange, or ServerExchange where no tensor travels as factors
    allreduce                                AllReduceExchange

Small tensors share tables on the server: a PooledExchange wraps either of the first two.

Where a host has several workers, local rank 0 has that exchange, inside a LeaderExchange, and each of the others has a
FollowerExchange.

With local steps (`rounds/local_steps.py`) all of this is the outer exchange, inside a LocalStepsExchange of each worker.

Law: every worker of a job makes the same plan and the same store, since both follow from what is equal on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from poseidon.errors import UsageError
from poseidon.exchange.allreduce.exchange import AllReduceExchange
from poseidon.exchange.allreduce.process_group import GroupSettings, join_rendezvous
from poseidon.exchange.base import Exchange, ExchangeSettings, Trained
from poseidon.exchange.cost import Choice, ExchangeKind, ExchangePlan, Scheme, Topology, choose
from poseidon.exchange.hybrid import HybridExchange
from poseidon.exchange.local.follower import FollowerExchange
from poseidon.exchange.local.group import LocalGroup
from poseidon.exchange.local.leader import LeaderExchange
from poseidon.exchange.lossy.compression import codecs_of
from poseidon.exchange.lossy.low_rank import LowRankExchange
from poseidon.exchange.lossy.low_rank_matrix import LowRank, low_rank_tensors
from poseidon.exchange.observe.statistics import CountsTraffic
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions, OnDivergence
from poseidon.exchange.pooled import PooledExchange, pool_tensors, pools_of
from poseidon.exchange.ps import ServerExchange, store_spec
from poseidon.exchange.rounds.local_steps import LocalStepsExchange, anchors_of, is_synchronous, outer_rule
from poseidon.exchange.rounds.streaming import AloneTables, StreamingExchange
from poseidon.exchange.single import SingleProcessExchange
from ps_server import Client, CodecPair, StoreSpec
from ps_server.keys import Keyring
from ps_server.protocol.precision import pushed_in, sent_in
from ps_server.trace import NO_TRACE, Tracer

TIMEOUT_S = 600.0

Connect = Callable[[str], Sequence[str]]
"""Reports the address at which this worker listens for the others, unless it is empty; waits for the addresses of the job
and returns them: of the shards in their order, or of rank 0 where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The position of one worker in its job.

    Args:
        rank: of this worker's host, 0..workers-1.
        workers: number of hosts with workers: of those who push.
        shards: number of shards; 0 for a worker that is alone, and for all-reduce.
        host: the address at which the other hosts reach this one; an IPv6 address in brackets.
        token: the job's secret.
        keys: own key pair, and the public keys of all hosts' workers and of the shards; None: no encryption.
        homes: for each shard the client with workers on whose host it runs, or -1 - j for serving host j; empty: spread
            evenly over the hosts with workers.
        loads: relative load of each shard; empty: all equal.
        timeout_s: longest time that any call waits.
        local_rank: of this worker among those of its host; 0 is the leader.
        local_workers: workers on each host.
        local_address: where the leader listens for the followers (`LocalGroup`).
        options: of the exchange.
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

    @property
    def alone(self) -> bool:
        """Whether there is no other host to exchange with."""
        return self.options.kind is ExchangeKind.LOCAL or (self.workers == 1 and self.shards == 0)

    @property
    def private_histories(self) -> bool:
        """`ExchangeState.private` of the exchange, before it is built; it is not where local steps are synchronous."""
        return self.options.sync_every > 0 or (self.options.staleness > 0 and not self.alone)

    @property
    def topology(self) -> Topology:
        """The clients that push, and the load of each host's shards. Without shards: a shard on each host, to compare with."""
        if not self.shards:
            return Topology.colocated(self.workers)
        homes = self.homes or tuple(shard * self.workers // self.shards for shard in range(self.shards))
        return Topology.of_shards(self.workers, homes, self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An exchange that is not yet opened, with its parts.

    Attributes:
        exchange: the exchange.
        plan: the scheme of each tensor.
        store: the store that workers and shards agree on; None without shards.
        tables: for each table of the store the indices of its tensors.
        client: this worker's connection to the shards; None without shards.
        traffic: counts the traffic of the tensors; None where nothing counts it.
        local_steps: iterations of a round of local steps; 0: workers exchange in every iteration.
    """

    exchange: Exchange
    plan: ExchangePlan
    store: StoreSpec | None = None
    tables: Sequence[Sequence[int]] = ()
    client: Client | None = None
    traffic: CountsTraffic | None = None
    local_steps: int = 0


def plan_exchange(tensors: Sequence[Trained], member: Membership) -> ExchangePlan:
    """Choose the scheme of each tensor.

    Where every tensor would travel as factors, the one whose bytes grow least goes to the server: a request of rank 0
    (`ShardDelivery`) is in step with training only where training reads from the shards.
    """
    options = member.options
    kind = ExchangeKind.LOCAL if member.alone else options.kind
    wire = (options.precision, options.consistency, options.staleness)
    plan = choose(
        tensors,
        kind,
        member.topology,
        gradients=pushed_in(*wire),
        values=sent_in(*wire),
        codecs=codecs_of(tensors, options.compress, options.loss_budget),
    )
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
    """Build the exchange of one worker, and connect to the shards, or to the rendezvous where there are none.

    Args:
        tensors: what to keep together, the same on every worker.
        settings: common to all tensors.
        member: this worker and its job.
        connect: exchanges addresses with the rest of the job.
        trace: where spans of messages go.

    Raises:
        TransportError: an address cannot be reached or listened on.
    """
    if member.options.sync_every:
        return _build_local_steps(tensors, settings, member, connect, trace)
    if member.local_workers > 1:
        return _build_local_group(tensors, settings, member, connect, trace)
    plan = plan_exchange(tensors, member)
    kind = ExchangeKind.LOCAL if member.alone else member.options.kind
    return _BUILDERS[kind](_Request(tensors, settings, member, connect, trace, plan))


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `build_exchange`, and the plan."""

    tensors: Sequence[Trained]
    settings: ExchangeSettings
    member: Membership
    connect: Connect
    trace: Tracer
    plan: ExchangePlan

    @property
    def equal_bits(self) -> bool:
        """Whether the job ends where the processors of the replicas compute different bits."""
        return self.member.options.on_divergence is OnDivergence.STOP

    def client(self, store: StoreSpec, *, table_clocks: bool = False) -> Client:
        """Connect to the shards."""
        return Client(
            self.connect(""),
            rank=self.member.rank,
            store=store,
            token=self.member.token,
            keys=self.member.keys,
            timeout_s=self.member.timeout_s,
            bandwidth_mbps=self.member.options.bandwidth_mbps,
            table_clocks=table_clocks,
            trace=self.trace,
        )


def _build_alone(request: _Request) -> Built:
    return Built(exchange=SingleProcessExchange(request.tensors, request.settings), plan=request.plan)


def _build_allreduce(request: _Request) -> Built:
    member = request.member
    group = GroupSettings(
        rank=member.rank, size=member.workers, host=member.host.strip("[]"), timeout_s=member.timeout_s
    )
    exchange = AllReduceExchange(
        join_rendezvous(group, request.connect),
        request.tensors,
        request.settings,
        group=group,
        equal_bits=request.equal_bits,
    )
    return Built(exchange=exchange, plan=request.plan, traffic=exchange)


def _build_server(request: _Request) -> Built:
    """Build the exchange through the shards, with factors where the plan has them."""
    settings, member = request.settings, request.member
    chosen = _low_rank(request)
    factors = low_rank_tensors(request.tensors, chosen)
    owners = [index for index, parts in factors.items() for _ in parts]
    first = len(owners)  # P and Q come first: their two rounds are the longest way
    tensors = [*(part for parts in factors.values() for part in parts), *request.tensors]
    codecs = [*_factor_codecs(factors, chosen), *map(_codec, request.plan.choices)]
    by_factors = [first + index for index in request.plan.of(Scheme.FACTORS)]
    copies = [*by_factors, *(first + index for index in chosen)]
    pools: Sequence[Sequence[int]] = [(index,) for index in range(len(tensors))]
    if not member.options.rows:  # tables that are to be cut into so many pieces are not shared
        lossy = [index for index, codec in enumerate(codecs) if codec is not None]
        pools = pools_of(tensors, apart=[*range(first), *copies, *lossy])
    pooled = pool_tensors(tensors, pools)
    table = {pool[0]: place for place, pool in enumerate(pools)}
    store = store_spec(
        pooled,
        settings,
        workers=member.workers,
        shards=member.shards,
        options=member.options,
        loads=member.loads,
        by_factors=[table[index] for index in copies],
        codecs=[codecs[pool[0]] for pool in pools],
    )
    client = request.client(store)
    exchange: HybridExchange | PooledExchange | ServerExchange | LowRankExchange
    if by_factors:
        exchange = HybridExchange(
            client,
            pooled,
            store,
            settings,
            by_factors=[table[index] for index in by_factors],
            listen=f"tcp://{member.host}:0",
            token=member.token,
            keys=member.keys,
            equal_bits=request.equal_bits,
            timeout_s=member.timeout_s,
            trace=request.trace,
        )
    else:
        exchange = ServerExchange(client, pooled, store, settings)
    if len(pools) < len(tensors):
        exchange = PooledExchange(exchange, exchange, tensors, pools, pooled)
    if chosen:
        exchange = LowRankExchange(exchange, request.tensors, factors, chosen, settings)
    owners += range(len(request.tensors))
    return Built(
        exchange=exchange,
        plan=request.plan,
        store=store,
        tables=[[owners[index] for index in pool] for pool in pools],
        client=client,
        traffic=exchange,
    )


def _low_rank(request: _Request) -> dict[int, LowRank]:
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


def _codec(choice: Choice) -> CodecPair | None:
    return choice.codec if choice.is_compressed and isinstance(choice.codec, CodecPair) else None


_BUILDERS: dict[ExchangeKind, Callable[[_Request], Built]] = {
    ExchangeKind.HYBRID: _build_server,
    ExchangeKind.SERVER: _build_server,
    ExchangeKind.FACTORS: _build_server,
    ExchangeKind.ALLREDUCE: _build_allreduce,
    ExchangeKind.LOCAL: _build_alone,
}
"""What builds the exchange of each kind."""


def _build_local_steps(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    member: Membership,
    connect: Connect,
    trace: Tracer,
) -> Built:
    """Build an exchange of one iteration for rounds. A wait is as long as a round of another worker may take longer."""
    options = member.options
    of_rounds = replace(
        member,
        options=options.without_local_steps,
        timeout_s=member.timeout_s * options.sync_every,
    )
    if is_synchronous(options, tensors, settings):
        return build_exchange(tensors, settings, of_rounds, connect, trace=trace)
    workers = member.workers * member.local_workers
    delayed = workers if options.staleness and not member.alone else 0
    anchors = anchors_of(tensors, outer_rule(options, delayed=delayed > 0))
    outer_settings = ExchangeSettings(start_clock=settings.start_clock)
    if options.streams:
        return _build_streaming(
            tensors,
            anchors,
            settings,
            options,
            _Request(anchors, outer_settings, of_rounds, connect, trace, plan_exchange(anchors, of_rounds)),
        )
    built = build_exchange(anchors, outer_settings, of_rounds, connect, trace=trace)
    return replace(
        built,
        exchange=LocalStepsExchange(built.exchange, tensors, anchors, settings, options, delayed=delayed),
        plan=replace(built.plan, local_steps=options.sync_every),
        local_steps=options.sync_every,
    )


def _build_streaming(
    tensors: Sequence[Trained],
    anchors: Sequence[Trained],
    settings: ExchangeSettings,
    options: ExchangeOptions,
    request: _Request,
) -> Built:
    """Build an exchange of fragments, each at other iterations. Its tensors share no tables."""
    plan = replace(request.plan, local_steps=options.sync_every)
    if request.member.alone:
        alone = AloneTables(anchors, request.settings)
        exchange = StreamingExchange(alone, tensors, anchors, settings, options)
        return Built(exchange=exchange, plan=plan, local_steps=options.sync_every)
    options.check_workers_per_host(request.member.local_workers)
    if _low_rank(request):
        raise UsageError(
            "--compress=powersgd takes two rounds through the shards for each exchange; expected another codec, or no "
            "--sync_fragments and --sync_delay"
        )
    store = store_spec(
        anchors,
        request.settings,
        workers=request.member.workers,
        shards=request.member.shards,
        options=request.member.options,
        loads=request.member.loads,
        codecs=[_codec(choice) for choice in request.plan.choices],
    )
    client = request.client(store, table_clocks=True)
    server = ServerExchange(
        client,
        anchors,
        store,
        request.settings,
        in_background=options.sync_delay > 0,
    )
    return Built(
        exchange=StreamingExchange(server, tensors, anchors, settings, options),
        plan=plan,
        store=store,
        tables=[(index,) for index in range(len(anchors))],
        client=client,
        traffic=server,
        local_steps=options.sync_every,
    )


def _build_local_group(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    member: Membership,
    connect: Connect,
    trace: Tracer,
) -> Built:
    """Build the exchange of one of several workers of a host. The factors of all of them leave together."""
    group = LocalGroup(
        address=member.local_address,
        rank=member.local_rank,
        workers=member.local_workers,
        timeout_s=member.timeout_s,
    )
    of_host = [replace(t, factor_rows=t.factor_rows * group.workers) for t in tensors]
    one = replace(member, local_rank=0, local_workers=1)
    if group.rank:
        return Built(exchange=FollowerExchange(tensors, group), plan=plan_exchange(of_host, one))
    built = build_exchange(of_host, settings, one, connect, trace=trace)
    return replace(built, exchange=LeaderExchange(built.exchange, tensors, group))
