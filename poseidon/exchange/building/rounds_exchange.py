"""The builder of an exchange with local steps: an exchange of one iteration for rounds, or of
fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.building.built import Built
from poseidon.exchange.building.server_exchange import (
    BuildArguments,
    PlanePart,
    build_alone,
    build_server,
    low_rank_of,
)
from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import POWERSGD_IN_PARTS
from poseidon.exchange.rounds.local_steps import (
    RoundsCarrier,
    RoundsExchange,
    anchors_of,
    is_synchronous,
    outer_rule,
)
from poseidon.exchange.rounds.quorum import QuorumRounds
from poseidon.exchange.server.carrier import Parts

Build = Callable[
    [Sequence[Trained], ExchangeSettings, Membership, Sequence[Sequence[Trained]]], Built
]
"""Builds an exchange; the last argument is the shards of `build_exchange`."""
Plan = Callable[[Sequence[Trained], Membership], ExchangePlan]


def build_local_steps(arguments: BuildArguments, build: Build, plan: Plan) -> Built:
    """Build an exchange of one iteration for rounds.

    A wait is as long as a round of another worker may take longer.
    """
    tensors, settings, member = arguments.tensors, arguments.settings, arguments.job
    network = member.network
    options = member.options.of_workers(member.placed)
    if options.quorum:
        options.check_workers_per_host(max(member.hosts, default=1))
    of_rounds = replace(
        member,
        options=options.without_local_steps,
        quorum=(options.quorum, options.quorum_grace),
        network=replace(network, timeout_s=network.timeout_s * options.local_steps),
    )
    if is_synchronous(options, tensors, settings):
        return build(tensors, settings, of_rounds, arguments.shards)
    # whose changes count the same: the workers, or the hosts where these divide the tensors
    senders = member.host_count if arguments.shards else network.size
    delayed = senders if options.staleness and not member.alone else 0
    rule = outer_rule(options, delayed=delayed > 0)
    anchors = anchors_of(tensors, rule)
    outer_settings = ExchangeSettings(start_clock=settings.start_clock)
    if options.streams:
        if not member.alone:
            options.check_workers_per_host(max(member.hosts, default=1))
        plan_of_parts = plan(anchors, of_rounds)
        outer = replace(
            arguments,
            tensors=anchors,
            settings=outer_settings,
            member=of_rounds,
            job=of_rounds,
            plan=plan_of_parts,
            planes=[PlanePart(anchors, plan_of_parts)],
        )
        built = _build_parts(outer, in_background=options.sync_delay > 0)
    else:
        shards = [anchors_of(plane, rule) for plane in arguments.shards]
        built = build(anchors, outer_settings, of_rounds, shards)
    rounds = RoundsCarrier(
        built.exchange,
        tensors,
        anchors,
        settings,
        options,
        delayed=delayed,
        rank=network.rank,
        own=member.own,
        # where workers of a host have shards, each has its own of the first host's
        reads_outer=member.host == 0 if arguments.shards else built.exchange.control.root,
        quorum=_rounds_of_quorum(built, network.size) if options.quorum else None,
    )
    return replace(
        built,
        exchange=RoundsExchange(rounds, settings, network.interruption),
        plan=replace(built.plan, local_steps=options.local_steps),
        local_steps=options.local_steps,
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
