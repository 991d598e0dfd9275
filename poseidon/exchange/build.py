"""The factory of exchanges: builds the exchange of one worker from its membership of a job.

    kind                        carriers
    alone                       AloneCarrier
    hybrid, ps, svb, auto       ServerCarrier; FactorCarrier and AllReduceCarrier where the plan has their schemes
    allreduce                   AllReduceCarrier

`auto` makes its plan by a measurement (`auto/trial.py`), or uses the plan of an earlier run; a
small net's follows from the bytes, as with `hybrid`.

Where a host has several workers, local rank 0 has that exchange within a LeaderCarrier, and each of
the others has a FollowerCarrier.

With local steps (`rounds/local_steps.py`) all of this is the outer exchange, within a RoundsCarrier
of each worker.

Law: every worker of a job makes the same plan and the same store, since both follow from what is
equal on all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from poseidon.errors import UsageError
from poseidon.exchange.allreduce.carrier import AllReduceCarrier
from poseidon.exchange.allreduce.links_delivery import LinksDelivery
from poseidon.exchange.allreduce.peers import Peers
from poseidon.exchange.auto.rates import fastest_schemes
from poseidon.exchange.auto.trial import is_worth_measuring, measure, trial_store
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.building.built import Built, Connect
from poseidon.exchange.building.rounds_exchange import Build, build_local_steps
from poseidon.exchange.building.server_exchange import (
    BuildArguments,
    build_alone,
    build_server,
    layout_of,
    low_rank_of,
)
from poseidon.exchange.cost import ELEMENT_BYTES, Choice, ExchangePlan, choose
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.kinds import ExchangeKind, Scheme
from poseidon.exchange.local.follower import FollowerCarrier
from poseidon.exchange.local.group import HostTree, LocalGroup
from poseidon.exchange.local.leader import LeaderCarrier
from poseidon.exchange.lossy.compression import compressions_of
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import check_virtual_workers, no_powersgd
from poseidon.exchange.server.pool import SMALL_TENSOR_ELEMENTS
from poseidon.exchange.turns import Turns
from ps_server.protocol.precision import pushed_in, sent_in
from ps_server.trace import NO_TRACE, Tracer


def plan_exchange(
    tensors: Sequence[Trained], member: Membership, schemes: Sequence[Scheme] = ()
) -> ExchangePlan:
    """Choose the scheme of each tensor.

    Where no tensor would go to the server, the last small one does, or the one whose bytes grow
    least: a request of rank 0 (`ShardDelivery`) is in step with training only where training reads
    from the shards. The gradient of the last tensor is the first that a backward pass has, and its
    value the last that a forward pass needs, so nothing waits for it.

    Args:
        tensors: in the order of the store's tables.
        schemes: of each tensor, where they are chosen already; empty: they follow from the bytes.
    """
    options = member.options
    several = member.placed.count > 1 and options.kind is not ExchangeKind.LOCAL
    kind = ExchangeKind.LOCAL if member.alone and not several else options.kind
    wire = (options.precision, options.consistency, options.staleness)
    plan = choose(
        tensors,
        kind,
        member.topology,
        gradients=pushed_in(*wire),
        values=sent_in(*wire),
        compressions=compressions_of(tensors, options.compress, options.loss_budget),
        packs_rows=options.packs_rows,
    )
    choices = plan.choices
    if schemes:
        choices = tuple(
            replace(c, scheme=scheme) for c, scheme in zip(choices, schemes, strict=True)
        )
    has_others = any(choice.scheme in (Scheme.FACTORS, Scheme.ALLREDUCE) for choice in choices)
    is_served = any(choice.scheme is Scheme.SERVER for choice in choices)
    if kind.has_shards and has_others and not is_served:
        trained = [choice for choice in choices if not tensors[choice.index].statistics]
        small = SMALL_TENSOR_ELEMENTS * ELEMENT_BYTES

        def order(choice: Choice) -> tuple[int, int]:
            without = choice.bytes if choice.scheme is Scheme.FACTORS else 0
            return max(choice.server_bytes - without, small), -choice.index

        served = min(trained, key=order)
        choices = tuple(replace(c, scheme=Scheme.SERVER) if c is served else c for c in choices)
    return ExchangePlan(choices=choices)


def build_exchange(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    member: Membership,
    connect: Connect,
    *,
    trace: Tracer = NO_TRACE,
    schemes: Sequence[Scheme] = (),
) -> Built:
    """Build the exchange of one worker, and connect to the shards, or to the other workers where
    there are none.

    Args:
        tensors: what to keep together, the same on every worker.
        member: this worker and its job. `Network.interruption` may end all waits, also the waits of
            this call, except `connect`.
        connect: exchanges addresses with the rest of the job.
        schemes: of each tensor, that `--exchange=auto` has chosen in an earlier run; empty: it
            chooses.

    Raises:
        ServerError: the interruption's.
        TransportError: an address cannot be reached or listened on.
        UsageError: a tensor cannot be exchanged by its scheme of an earlier run, or virtual workers
            not by these options.
    """

    def build(
        own: Sequence[Trained], own_settings: ExchangeSettings, own_member: Membership
    ) -> Built:
        return build_exchange(own, own_settings, own_member, connect, trace=trace, schemes=schemes)

    member.network.interruption.check()
    check_virtual_workers(member.virtual_workers, member.options, member.local_workers)
    if not _takes_schemes(member, schemes):
        schemes = ()  # they are of a different exchange
    arguments = BuildArguments(
        tensors, settings, member, connect, trace, plan_exchange(tensors, member)
    )
    built = _build(arguments, build, schemes)
    return replace(built, most_lead=member.options.most_lead)


def _build(arguments: BuildArguments, build: Build, schemes: Sequence[Scheme]) -> Built:
    """Build the exchange that a member's options ask for.

    Args:
        build: builds the exchange between rounds, or between hosts.
    """
    tensors, member = arguments.tensors, arguments.member
    if member.options.local_steps:
        return build_local_steps(arguments, build, plan_exchange)
    if member.local_workers > 1:
        return _build_local_group(arguments, build)
    if schemes and (member.placed.count > 1 or not member.alone):
        _check_schemes(schemes, arguments)
        arguments = replace(arguments, plan=plan_exchange(tensors, member, schemes))
    if member.alone:
        return replace(build_alone(arguments), recorded=_keeps_plan(member))
    if schemes:
        plan = replace(arguments.plan, basis="the plan of an earlier run")
        built = build_server(replace(arguments, plan=plan))
        return replace(built, recorded=member.options.chooses)
    if member.options.kind is ExchangeKind.ALLREDUCE:
        return _build_allreduce(arguments)
    if not member.chooses:
        return replace(build_server(arguments), recorded=_keeps_plan(member))
    if is_worth_measuring(tensors):
        return _build_measured(arguments)
    return replace(build_server(arguments), recorded=True)


def _takes_schemes(member: Membership, schemes: Sequence[Scheme]) -> bool:
    """Return whether the job takes over the schemes of an earlier run: `auto` does. `hybrid` does
    where it continues with virtual workers, as their number would give it another plan than the
    cluster of that run.
    """
    of_cluster = member.options.kind is ExchangeKind.HYBRID and member.virtual_workers is not None
    return member.options.chooses or (of_cluster and Scheme.ALLREDUCE not in schemes)


def _keeps_plan(member: Membership) -> bool:
    """Return whether a resumed job takes over the plan, though it was not measured: without virtual
    workers of its own it would measure.
    """
    virtual = member.virtual_workers
    return member.options.chooses and virtual is not None and virtual.count > 1


def _check_schemes(schemes: Sequence[Scheme], arguments: BuildArguments) -> None:
    """Refuse schemes of an earlier run that this job cannot use.

    Raises:
        UsageError: names the tensor, its scheme and what to do.
    """
    instead = "expected the plan of a job with the same net and flags, or no --exchange_plan"
    choices = arguments.plan.choices
    if len(schemes) != len(choices):
        raise UsageError(
            f"the exchange plan has {len(schemes)} tensors, and this job {len(choices)}; {instead}"
        )
    for choice, scheme in zip(choices, schemes, strict=True):
        if scheme is Scheme.FACTORS and choice.factor_bytes is None:
            raise UsageError(
                f"the exchange plan sends '{choice.name}' as factors, and its gradient has none; "
                f"{instead}"
            )
        if scheme is Scheme.ALLREDUCE and choice.compression is not None:
            raise UsageError(
                f"the exchange plan sums '{choice.name}' by all-reduce, which cannot compress it "
                f"as {choice.compression}; {instead}"
            )
        if scheme is not Scheme.SERVER and choice.has_16_bits:
            raise UsageError(
                f"the exchange plan has '{choice.name}' by {scheme.value}, and parameters of 16 "
                f"bits go to the shards; {instead}"
            )


def _build_measured(arguments: BuildArguments) -> Built:
    tensors, member = arguments.tensors, arguments.member
    served = plan_exchange(tensors, member, [Scheme.SERVER] * len(tensors))
    client = arguments.client(
        trial_store(tensors, member), memory_for=layout_of(replace(arguments, plan=served)).store
    )
    try:
        rates = measure(client, tensors, member)
        rows = [trained.factor_rows for trained in tensors]
        plan = plan_exchange(
            tensors,
            member,
            fastest_schemes(arguments.plan.choices, rows, member.network.size, rates),
        )
        plan = replace(plan, basis=f"measured: {rates.summary()}")
        built = build_server(replace(arguments, plan=plan, joined=client))
    except BaseException:
        client.close()
        raise
    return replace(built, recorded=True)


def _build_allreduce(arguments: BuildArguments) -> Built:
    network, placed = arguments.member.network, arguments.member.placed
    peers = Peers(network)
    delivery = LinksDelivery(peers)
    control = JobControl(delivery, root=network.rank == 0)
    carrier = AllReduceCarrier(
        dict(enumerate(arguments.tensors)),
        arguments.settings,
        peers=peers,
        control=control,
        workers=placed,
        delivery=delivery,
        equal_bits=arguments.member.equal_bits,
    )
    try:
        peers.links.connect(arguments.connect(peers.links.address))
    except BaseException:
        carrier.close()
        raise
    turns = None if placed.is_one_each else Turns(arguments.tensors, placed, network.rank)
    exchange = Exchange(
        [carrier], control, arguments.settings, turns=turns, interruption=network.interruption
    )
    return Built(exchange=exchange, plan=arguments.plan)


def _build_local_group(arguments: BuildArguments, build: Build) -> Built:
    """Build the exchange of one of several workers of a host.

    The factors of all of them leave together.
    """
    tensors, member = arguments.tensors, arguments.member
    network = replace(
        member.network, rank=member.local_rank, size=member.local_workers, host="127.0.0.1"
    )
    group = LocalGroup(address=member.local_address, network=network, tree=_host_tree(member))
    # virtual workers have a plan of their own rows
    workers = network.size if group.tree.averages else 1
    of_host = [replace(t, factor_rows=t.factor_rows * workers) for t in tensors]
    one = replace(
        member,
        local_rank=0,
        local_workers=1,
        virtual_workers=None if group.tree.averages else member.placed,
    )
    placed = member.virtual_workers
    if placed is not None and low_rank_of(arguments):
        raise UsageError(no_powersgd(placed, network.size))
    turns = None
    if placed is not None and not placed.is_one_each:
        turns = Turns(
            tensors,
            placed,
            member.network.rank * network.size + network.rank,
            leaves=range(len(tensors)) if group.tree.leaves else (),
        )

    def exchange(carrier: LeaderCarrier | FollowerCarrier) -> Exchange:
        return Exchange(
            [carrier],
            carrier.control,
            arguments.settings,
            turns=turns,
            interruption=network.interruption,
        )

    if network.rank:
        if not one.alone:
            arguments.connect("")  # as its leader does: all workers take part in each exchange
        follower = FollowerCarrier(tensors, group)
        plan = plan_exchange(of_host, one, follower.schemes)
        return Built(exchange=exchange(follower), plan=plan)
    built = build(of_host, arguments.settings, one)
    leader = LeaderCarrier(
        built.exchange,
        tensors,
        group,
        encoded=built.encoded if group.tree.leaves else frozenset(),
        schemes=[choice.scheme for choice in built.plan.choices],
    )
    return replace(built, exchange=exchange(leader))


def _host_tree(member: Membership) -> HostTree:
    if member.virtual_workers is None:
        return HostTree.mean(member.local_workers)
    return HostTree(
        placed=member.virtual_workers,
        first=member.network.rank * member.local_workers,
        workers=member.local_workers,
        averages=False,
        leaves=member.options.is_encoded,
    )
