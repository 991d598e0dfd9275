"""The builder of the exchange of one of several workers of a host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.carrier import Carrier
from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.exchange import Built, Exchange
from poseidon.exchange.host.carrier import HostCarrier, HostRequests
from poseidon.exchange.host.contributions import HostTree
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.pieces import FlatPiece, HostPieces, cut
from poseidon.exchange.job_control import LinksControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, Scheme
from poseidon.exchange.server_exchange import BuildArguments, PlanePart, low_rank_of
from poseidon.exchange.turns import Turns
from ps_server import PeerLost
from ps_server.errors import as_server_error


def pieces_of(arguments: BuildArguments) -> tuple[FlatPiece, ...]:
    """Return the pieces of the tensors, by the plan."""
    plan = arguments.plan
    low_rank = low_rank_of(plan, arguments.settings)
    whole = {*plan.of(Scheme.FACTORS), *low_rank}
    if arguments.job.options.rows:  # each tensor is cut into so many already
        whole |= {choice.index for choice in plan.choices}
    tensors = arguments.tensors
    served = [index for index in plan.of(Scheme.SERVER) if not tensors[index].statistics]
    return cut(tensors, arguments.job.seats.planes, whole=whole, served=served[-1] if served else 0)


def parts_of(arguments: BuildArguments) -> list[PlanePart]:
    """Return the parts of all planes."""
    pieces, tensors, choices = pieces_of(arguments), arguments.tensors, arguments.plan.choices

    def part(plane: int) -> PlanePart:
        own = [piece for piece in pieces if piece.plane == plane]
        found = [piece.of(tensors[piece.index]) for piece in own]
        return PlanePart(
            found,
            ExchangePlan(
                choices=tuple(
                    replace(
                        choices[piece.index],
                        index=place,
                        name=trained.name,
                        shape=tuple(trained.tensor.shape),
                    )
                    for place, (piece, trained) in enumerate(zip(own, found, strict=True))
                )
            ),
        )

    return [part(plane) for plane in range(arguments.job.seats.planes)]


def build_on_host(arguments: BuildArguments, build: Callable[[BuildArguments], Built]) -> Built:
    """Build the exchange of one of several workers of a host, which own pieces of the tensors, or
    have shards of a module each.

    Args:
        build: builds the exchange of this worker's plane.
    """
    job, tensors, network = arguments.job, arguments.tensors, arguments.job.network
    shards = bool(arguments.shards)
    tree = HostTree.mean(job.seat.local_workers) if shards else _tree(job)
    every = [t for part in arguments.planes for t in part.tensors] if shards else tensors
    group = _group(job, tree, every)
    on_worker = job.alone or job.options.staleness > 0
    # over the workers of the host, where no shard adds the squares of all planes
    limits = on_worker or job.options.kind is ExchangeKind.ALLREDUCE
    all_squares = group.all_squares if limits else math.fsum
    carriers: list[Carrier]
    with _refusing(group, network.rank):
        built = build(replace(arguments, takes_nodes=not shards, all_squares=all_squares))
        inner = built.exchange
        # a job on one host has the connections of its workers alone
        control = LinksControl(group.peers) if job.alone else inner.control
        if shards:
            carriers, turns = [HostRequests(group, control), *inner.carriers], inner.turns
        else:
            with _ending(inner):
                pieces = pieces_of(replace(arguments, plan=built.plan))
                group.owners = {piece.plane for piece in pieces}
                by_factors = frozenset(built.plan.of(Scheme.FACTORS))
                encoded = built.encoded if tree.leaves else frozenset()
                of_host = HostPieces(tensors, pieces, group.rank, by_factors, encoded)
                carrier = HostCarrier(inner, of_host, group, control, private=job.is_stale)
            leaves = range(len(tensors)) if tree.leaves else ()
            carriers, turns = [carrier], None
            if job.takes_turns:
                turns = Turns(tensors, job.by_worker, network.rank, leaves=leaves)
    exchange = Exchange(
        carriers,
        control,
        arguments.settings,
        turns=turns,
        interruption=network.interruption,
        # elsewhere the exchange of the plane has the norm
        all_squares=all_squares if shards and on_worker else math.fsum,
    )
    return replace(built, exchange=exchange)


@contextmanager
def _refusing(group: HostGroup, rank: int) -> Iterator[None]:
    """Tell the other workers of the host why this one cannot exchange, if the body fails."""
    try:
        yield
    except Exception as error:
        what = f"worker {rank} cannot exchange"
        known = isinstance(error, UsageError)
        group.links.fail(PeerLost(f"{what}: {error}") if known else as_server_error(error, what))
        group.links.close()
        raise


@contextmanager
def _ending(exchange: Exchange) -> Iterator[None]:
    """End the exchange between hosts, if the body fails."""
    try:
        yield
    except Exception as error:
        exchange.interrupt(as_server_error(error, "the workers of this machine do not exchange"))
        exchange.close()
        raise


def _group(job: Membership, tree: HostTree, tensors: Sequence[Trained]) -> HostGroup:
    network = replace(
        job.network,
        rank=job.seat.local_rank,
        size=job.seat.local_workers,
        ranks=job.host_ranks,
        host="127.0.0.1",
        keys=None,
    )
    return HostGroup(job.local_address, network, tree, tensors)


def _tree(job: Membership) -> HostTree:
    if job.averages:
        return HostTree.mean(job.seat.local_workers)
    return HostTree(
        placed=job.by_worker,
        first=job.network.rank - job.seat.local_rank,
        workers=job.seat.local_workers,
        averages=False,
        leaves=job.options.is_encoded,
    )
