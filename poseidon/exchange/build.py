"""The factory of exchanges: builds the exchange of one worker from its membership of a job.

    kind                        carriers
    alone                       AloneCarrier
    hybrid, ps, svb, auto       ServerCarrier; FactorCarrier and AllReduceCarrier where the plan has their schemes
    allreduce                   AllReduceCarrier

`auto` makes its plan by a measurement (`auto/trial.py`), or uses the plan of an earlier run; a
small net's follows from the bytes, as with `hybrid`.

Where hosts have several workers, the tensors are cut into pieces, and each worker has that exchange
for the pieces of its plane, within a HostCarrier. Where its workers have shards of a module each, a
worker has that exchange for its shards, with HostRequests.

With local steps (`rounds/local_steps.py`) all of this is the outer exchange, within a RoundsCarrier
of each worker.

Law: every worker of a job makes the same plan and the same store, since both follow from what is
equal on all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from poseidon.errors import UsageError
from poseidon.exchange.auto.rates import fastest_schemes
from poseidon.exchange.auto.trial import is_worth_measuring, measure, trial_store
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.cost import ELEMENT_BYTES, Choice, ExchangePlan, Topology, choose
from poseidon.exchange.exchange import Built, Connect
from poseidon.exchange.host_exchange import build_on_host, parts_of
from poseidon.exchange.lossy.compression import compressions_of
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import POWERSGD_IN_PARTS, ExchangeKind, Scheme, check_virtual_workers
from poseidon.exchange.rounds.local_steps import (
    RoundsCarrier,
    RoundsExchange,
    anchors_of,
    is_synchronous,
    outer_rule,
)
from poseidon.exchange.rounds.quorum import QuorumRounds
from poseidon.exchange.server.carrier import Parts
from poseidon.exchange.server.placed import SMALL_TENSOR_ELEMENTS
from poseidon.exchange.server_exchange import (
    BuildArguments,
    PlanePart,
    build_allreduce,
    build_alone,
    build_server,
    layouts_of,
    low_rank_of,
)
from ps_server.protocol.precision import pushed_in, sent_in
from ps_server.trace import NO_TRACE, Tracer


def plan_exchange(
    tensors: Sequence[Trained], member: Membership, schemes: Sequence[Scheme] = ()
) -> ExchangePlan:
    """Choose the scheme of each tensor.

    Where no tensor would go to the server, the last small one does, or the one whose bytes grow
    least: a request of rank 0 (`ShardControl`) is in step with training only where training reads
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
        Topology.of_job(member),
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
    shards: Sequence[Sequence[Trained]] = (),
) -> Built:
    """Build the exchange of one worker, and connect to the shards, or to the other workers where
    there are none.

    Args:
        tensors: what to keep together, the same on every worker.
        member: this worker and its job. `Network.interruption` may end all waits, also the waits of
            this call, except `connect`.
        connect: exchanges addresses with the rest of the job.
        schemes: of each tensor, that `--exchange=auto` or `hybrid` has chosen in an earlier start or
            run; empty: it chooses.
        shards: where the workers of a host have shards of a module: of each plane, in the form of
            `tensors`, which are this worker's; the same on all workers. Values are not read. The
            workers of a host call `begin` with mean gradients over the host. Empty: all workers
            have the same tensors.

    Raises:
        ServerError: the interruption's.
        TransportError: an address cannot be reached or listened on.
        UsageError: a tensor cannot be exchanged by its scheme of an earlier run, or virtual workers
            not by these options.
    """

    member.network.interruption.check()
    check_virtual_workers(member.virtual_workers, member.options)
    member.options.check_workers_per_host(max(member.hosts, default=1))
    if not _takes_schemes(member, schemes):
        schemes = ()  # they are of a different exchange
    plan = plan_exchange(_of_hosts(tensors, member), member)
    planes = [PlanePart(own, plan_exchange(own, member)) for own in shards]
    if shards:
        planes[member.seat.local_rank] = PlanePart(tensors, plan_exchange(tensors, member))
    arguments = BuildArguments(
        tensors=tensors,
        settings=settings,
        connect=connect,
        trace=trace,
        plan=plan,
        job=member,
        planes=planes or [PlanePart(tensors, plan)],
        shards=shards,
    )
    if member.options.local_steps:
        return _build_local_steps(arguments, schemes)
    if member.seat.local_workers > 1:
        return build_on_host(arguments, partial(_build, schemes=() if shards else schemes))
    return _build(arguments, schemes)


def _of_hosts(tensors: Sequence[Trained], member: Membership) -> list[Trained]:
    """Return the tensors with the rows of all workers of a host, whose factors leave together.
    Virtual workers have a plan of their own rows.
    """
    workers = max(member.hosts, default=1) if member.averages else 1
    return [replace(trained, factor_rows=trained.factor_rows * workers) for trained in tensors]


def _build(arguments: BuildArguments, schemes: Sequence[Scheme]) -> Built:
    """Build the exchange of a plane.

    Args:
        arguments: with the plan of whole tensors, which are not cut yet.
    """
    member, job = arguments.member, arguments.job
    if schemes and (job.placed.count > 1 or not job.alone):
        _check_schemes(schemes, arguments)
        plan = plan_exchange(_of_hosts(arguments.tensors, job), job, schemes)
        arguments = replace(arguments, plan=plan)
    if job.alone:
        return replace(build_alone(_cut(arguments)), recorded=_keeps_plan(job))
    if schemes:
        plan = replace(arguments.plan, basis="the plan of an earlier run")
        return replace(build_server(_cut(replace(arguments, plan=plan))), recorded=True)
    if member.options.kind is ExchangeKind.ALLREDUCE:
        return build_allreduce(_cut(arguments))
    if not job.chooses:
        return replace(build_server(_cut(arguments)), recorded=_keeps_plan(job))
    if is_worth_measuring(arguments.tensors):
        return _build_measured(arguments)
    return replace(build_server(_cut(arguments)), recorded=True)


def _cut(arguments: BuildArguments) -> BuildArguments:
    """Cut the tensors among the planes, by the plan."""
    if arguments.shards:
        return arguments
    if not arguments.job.shares_hosts:
        return replace(arguments, planes=[PlanePart(arguments.tensors, arguments.plan)])
    return replace(arguments, planes=parts_of(arguments))


def _takes_schemes(member: Membership, schemes: Sequence[Scheme]) -> bool:
    """Return whether the job takes over the schemes of an earlier start or run: `auto` does, and
    `hybrid`, which would count other workers and shards, except schemes that it never chooses.
    """
    options = member.options
    return options.chooses or (options.keeps_schemes and Scheme.ALLREDUCE not in schemes)


def _keeps_plan(member: Membership) -> bool:
    """Return whether later starts and resumed runs take over the plan, though it was not measured:
    without virtual workers of their own they would measure, or count other workers and shards.
    """
    virtual = member.virtual_workers
    several = virtual is not None and virtual.count > 1
    of_cluster = member.options.kind is ExchangeKind.HYBRID and not member.alone
    return member.options.keeps_schemes and (several or of_cluster)


def _check_schemes(schemes: Sequence[Scheme], arguments: BuildArguments) -> None:
    """Refuse schemes of an earlier run that this job cannot use.

    Raises:
        UsageError: names the tensor, its scheme and what to do.
    """
    instead = "give the plan of a job with the same net and flags, or leave out --exchange_plan"
    choices = arguments.plan.choices
    if len(schemes) != len(choices):
        raise UsageError(
            f"the exchange plan has {len(schemes)} tensors, but this job has {len(choices)}; "
            f"{instead}"
        )
    for choice, scheme in zip(choices, schemes, strict=True):
        if scheme is Scheme.FACTORS and choice.factor_bytes is None:
            raise UsageError(
                f"the exchange plan sends '{choice.name}' as factors, but its gradient has none; "
                f"{instead}"
            )
        if scheme is Scheme.ALLREDUCE and choice.compression is not None:
            raise UsageError(
                f"the exchange plan sums '{choice.name}' by all-reduce, which cannot compress it "
                f"as {choice.compression}; {instead}"
            )
        if scheme is not Scheme.SERVER and choice.has_16_bits:
            raise UsageError(
                f"the exchange plan sends '{choice.name}' by {scheme.value}, but parameters of 16 "
                f"bits go to the shards; {instead}"
            )


def _build_measured(arguments: BuildArguments) -> Built:
    tensors, job = arguments.tensors, arguments.job
    of_hosts = _of_hosts(tensors, job)
    served = plan_exchange(of_hosts, job, [Scheme.SERVER] * len(tensors))
    _, largest, _ = layouts_of(_cut(replace(arguments, plan=served)))
    client = arguments.client(trial_store(tensors, job), memory_for=largest)
    try:
        rates = measure(client, of_hosts, job)
        rows = [trained.factor_rows for trained in of_hosts]
        schemes = fastest_schemes(arguments.plan.choices, rows, job.seat.host_count, rates)
        plan = replace(plan_exchange(of_hosts, job, schemes), basis=f"measured: {rates.summary()}")
        built = build_server(_cut(replace(arguments, plan=plan, joined=client)))
    except BaseException:
        client.close()
        raise
    return replace(built, recorded=True)


def _build_local_steps(arguments: BuildArguments, schemes: Sequence[Scheme]) -> Built:
    """Build an exchange with local steps: an exchange of one iteration for rounds, or of fragments.

    A wait is as long as a round of another worker may take longer.
    """
    tensors, settings, member = arguments.tensors, arguments.settings, arguments.job
    network = member.network

    def build(
        own: Sequence[Trained],
        own_settings: ExchangeSettings,
        shards: Sequence[Sequence[Trained]],
        schemes: Sequence[Scheme] = (),
    ) -> Built:
        return build_exchange(
            own,
            own_settings,
            of_rounds,
            arguments.connect,
            trace=arguments.trace,
            schemes=schemes,
            shards=shards,
        )

    options = member.options.of_workers(member.placed)
    of_rounds = replace(
        member,
        options=options.without_local_steps,
        network=replace(network, timeout_s=network.timeout_s * options.local_steps),
    )
    if is_synchronous(options, tensors, settings):
        return build(tensors, settings, arguments.shards, schemes)
    # whose changes count the same: the workers, or the hosts where these divide the tensors
    senders = member.seat.host_count if arguments.shards else network.size
    delayed = senders if options.staleness and not member.alone else 0
    rule = outer_rule(options, delayed=delayed > 0)
    anchors = anchors_of(tensors, rule)
    outer_settings = ExchangeSettings(
        start_clock=settings.start_clock, quorum=options.quorum, grace_s=options.quorum_grace
    )
    if options.streams:
        plan_of_parts = plan_exchange(anchors, of_rounds)
        outer = replace(
            arguments,
            tensors=anchors,
            settings=outer_settings,
            job=of_rounds,
            plan=plan_of_parts,
            planes=[PlanePart(anchors, plan_of_parts)],
        )
        built = _build_parts(outer, in_background=options.sync_delay > 0)
    else:
        shards = [anchors_of(plane, rule) for plane in arguments.shards]
        built = build(anchors, outer_settings, shards)  # no factors: schemes follow from that
    rounds = RoundsCarrier(
        built.exchange,
        tensors,
        anchors,
        settings,
        replace(member, options=options),
        delayed=delayed,
        # where workers of a host have shards, each has its own of the first host's
        reads_outer=member.seat.host == 0 if arguments.shards else built.exchange.control.root,
        quorum=_rounds_of_quorum(built, network.size) if options.quorum else None,
    )
    return replace(
        built,
        exchange=RoundsExchange(rounds, settings, network.interruption),
        plan=replace(built.plan, local_steps=options.local_steps),
    )


def _rounds_of_quorum(built: Built, workers: int) -> QuorumRounds:
    assert built.client is not None, "a quorum needs the parameter server"
    return QuorumRounds(built.client, built.exchange.control, workers)


def _build_parts(arguments: BuildArguments, *, in_background: bool) -> Built:
    """Build an exchange in whose iterations some tensors take no part. They share no tables."""
    if arguments.member.alone:
        return build_alone(arguments, in_parts=True)
    if low_rank_of(arguments.plan, arguments.settings):
        raise UsageError(POWERSGD_IN_PARTS)
    return build_server(arguments, Parts.IN_BACKGROUND if in_background else Parts.AT_ONCE)
