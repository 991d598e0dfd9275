"""The builder of an exchange with local steps: an exchange of one iteration for rounds, or of fragments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.building.membership import Built, Membership
from poseidon.exchange.building.server import Request, codec_of, low_rank_of
from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.ps import ServerExchange, store_spec
from poseidon.exchange.rounds.local_steps import LocalStepsExchange, anchors_of, is_synchronous, outer_rule
from poseidon.exchange.rounds.streaming import AloneTables, StreamingExchange

Build = Callable[[Sequence[Trained], ExchangeSettings, Membership], Built]
Plan = Callable[[Sequence[Trained], Membership], ExchangePlan]


def build_local_steps(request: Request, build: Build, plan: Plan) -> Built:
    """Build an exchange of one iteration for rounds. A wait is as long as a round of another worker may take longer.

    Args:
        request: of one worker.
        build: builds the exchange of one iteration.
        plan: chooses the scheme of each tensor.
    """
    tensors, settings, member = request.tensors, request.settings, request.member
    options = member.options
    of_rounds = replace(
        member,
        options=options.without_local_steps,
        timeout_s=member.timeout_s * options.sync_every,
    )
    if is_synchronous(options, tensors, settings):
        return build(tensors, settings, of_rounds)
    workers = member.workers * member.local_workers
    delayed = workers if options.staleness and not member.alone else 0
    anchors = anchors_of(tensors, outer_rule(options, delayed=delayed > 0))
    outer_settings = ExchangeSettings(start_clock=settings.start_clock)
    if options.streams:
        outer = replace(
            request,
            tensors=anchors,
            settings=outer_settings,
            member=of_rounds,
            plan=plan(anchors, of_rounds),
        )
        return _build_streaming(tensors, anchors, settings, options, outer)
    built = build(anchors, outer_settings, of_rounds)
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
    request: Request,
) -> Built:
    """Build an exchange of fragments, each at other iterations. Its tensors share no tables."""
    plan = replace(request.plan, local_steps=options.sync_every)
    if request.member.alone:
        alone = AloneTables(anchors, request.settings)
        exchange = StreamingExchange(alone, tensors, anchors, settings, options)
        return Built(exchange=exchange, plan=plan, local_steps=options.sync_every)
    options.check_workers_per_host(request.member.local_workers)
    if low_rank_of(request):
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
        codecs=[codec_of(choice) for choice in request.plan.choices],
    )
    client = request.client(store, table_clocks=True)
    server = ServerExchange(client, anchors, store, request.settings, in_background=options.sync_delay > 0)
    return Built(
        exchange=StreamingExchange(server, tensors, anchors, settings, options),
        plan=plan,
        store=store,
        tables=[(index,) for index in range(len(anchors))],
        client=client,
        traffic=server,
        local_steps=options.sync_every,
    )
