"""The builder of the exchange of one of several workers of a host."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.exchange import Built, Exchange
from poseidon.exchange.host.carrier import HostCarrier, HostRequests
from poseidon.exchange.host.contributions import HostTree
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.pieces import FlatPiece, HostPieces, cut
from poseidon.exchange.job_control import JobControl, LinksControl
from poseidon.exchange.kinds import ExchangeKind, Scheme
from poseidon.exchange.membership import Membership
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
    return cut(tensors, arguments.job.planes, whole=whole, served=served[-1] if served else 0)


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

    return [part(plane) for plane in range(arguments.job.planes)]


def build_on_host(arguments: BuildArguments, build: Callable[[BuildArguments], Built]) -> Built:
    """Build the exchange of one of several workers of a host.

    Args:
        build: builds the exchange of this worker's plane.
    """
    job, tensors, network = arguments.job, arguments.tensors, arguments.job.network
    tree = _tree(job)
    group = _group(job, tree, tensors)
    with _refusing(group, network.rank):
        all_squares = _all_squares(job, group)
        built = build(replace(arguments, takes_nodes=True, all_squares=all_squares))
        control = _control(job, group, built)
        with _ending(built.exchange):
            carrier = HostCarrier(
                built.exchange,
                HostPieces(tensors, pieces_of(replace(arguments, plan=built.plan)), group.rank),
                group,
                by_factors=frozenset(built.plan.of(Scheme.FACTORS)),
                encoded=built.encoded if tree.leaves else frozenset(),
                control=control,
                private=job.is_stale,
            )
    turns = None
    if job.takes_turns:
        leaves: Sequence[int] = range(len(tensors)) if tree.leaves else ()
        turns = Turns(tensors, job.by_worker, network.rank, leaves=leaves)
    exchange = Exchange(
        [carrier], control, arguments.settings, turns=turns, interruption=network.interruption
    )
    return replace(built, exchange=exchange)


def build_of_shards(arguments: BuildArguments, build: Callable[[BuildArguments], Built]) -> Built:
    """Build the exchange of one of several workers of a host, each of which has shards of a module.

    Args:
        build: builds the exchange of this worker's plane.
    """
    job, network = arguments.job, arguments.job.network
    every = [trained for part in arguments.planes for trained in part.tensors]
    group = _group(job, HostTree.mean(job.local_workers), every)
    os.close(group.file)
    all_squares = _all_squares(job, group)
    with _refusing(group, network.rank):
        built = build(replace(arguments, all_squares=all_squares))
        control = _control(job, group, built)
        requests = HostRequests(group, control)
    # elsewhere the shards of the server, or the sums, have the norm over all planes
    on_worker = job.alone or job.options.staleness > 0
    exchange = Exchange(
        [requests, *built.exchange.carriers],
        control,
        arguments.settings,
        turns=built.exchange.turns,
        interruption=network.interruption,
        all_squares=all_squares if on_worker else math.fsum,
    )
    return replace(built, exchange=exchange)


def _all_squares(job: Membership, group: HostGroup) -> Callable[[Sequence[float]], float]:
    """Return how the exchange of a plane adds the squares of its gradients: over the workers of the
    host, where no shard adds those of all planes.
    """
    limits = job.alone or job.options.staleness > 0 or job.options.kind is ExchangeKind.ALLREDUCE
    return group.all_squares if limits else math.fsum


def _control(job: Membership, group: HostGroup, built: Built) -> JobControl:
    """Return the control of all workers of the job: a job on one host has the connections of its
    workers alone.
    """
    return LinksControl(group.peers) if job.alone else built.exchange.control


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
        rank=job.local_rank,
        size=job.local_workers,
        ranks=job.host_ranks,
        host="127.0.0.1",
        keys=None,
    )
    return HostGroup(job.local_address, network, tree, tensors)


def _tree(job: Membership) -> HostTree:
    if job.averages:
        return HostTree.mean(job.local_workers)
    return HostTree(
        placed=job.by_worker,
        first=job.network.rank - job.local_rank,
        workers=job.local_workers,
        averages=False,
        leaves=job.options.is_encoded,
    )
