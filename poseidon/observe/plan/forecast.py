"""The iteration time of every scheme on a cluster, and the flags to choose. Pure.

Law: every scheme is predicted for the same machine and links. A scheme is recommended if it is the
fastest of those that give the weights of one process with all batches; lossy ones are named beside
it with their gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from poseidon.errors import counted
from poseidon.observe.plan.cluster_probe import NetworkLinks
from poseidon.observe.plan.costs import HostCosts
from poseidon.observe.plan.iteration import auto_scenario, predict
from poseidon.observe.plan.scenario import (
    Lossy,
    PlannedExchange,
    PlannedLowRank,
    Scenario,
    WireCodec,
    link_bytes,
    loads,
)
from poseidon.observe.plan.shapes import CoreCosts, Machine
from poseidon.observe.plan.sources import Training
from ps_server.json_fields import fields_of
from ps_server.protocol.virtual_workers import VirtualWorkers

HEADERS = 0.94
"""The part of a link's nominal rate that carries values: TCP over frames of 1500 bytes."""
GPU_FLOPS = 5e12
"""Assumed of products on a GPU; only weights that travel as factors need them."""
LOCAL_STEPS = (8, 32)
RANKS = (1, 4)
"""Of PowerSGD."""
NEAR = 0.03
"""Schemes that differ by less are equally fast; the default is then kept."""
GAIN = 1.1
"""A lossy scheme is named if it is this many times faster."""
BOUND_BY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to exchange.

    Attributes:
        flags: of `poseidon train` and `poseidon run`; empty: it is not one of Poseidon's.
        local_steps: iterations between exchanges.
        auto: the schemes are chosen as by `--exchange=auto`.
    """

    name: str
    flags: str = ""
    exchange: PlannedExchange = PlannedExchange.PS
    lossy: Lossy | None = None
    local_steps: int = 1
    auto: bool = False

    @property
    def exact(self) -> bool:
        """Whether the weights equal the weights of one process with all batches."""
        return self.lossy is None and self.local_steps == 1


DEFAULT = Way(name="auto", flags="--exchange=auto", auto=True)
WAYS: tuple[Way, ...] = (
    DEFAULT,
    Way(name="hybrid", flags="--exchange=hybrid", exchange=PlannedExchange.HYBRID),
    Way(name="ps", flags="--exchange=ps"),
    Way(name="svb", flags="--exchange=svb", exchange=PlannedExchange.SVB),
    Way(name="allreduce", flags="--exchange=allreduce", exchange=PlannedExchange.RING),
    Way(name="ps, bfloat16", flags="--exchange=ps --wire_precision=bfloat16", lossy=WireCodec.HALF),
    Way(name="ps, int8", flags="--exchange=ps --compress=int8", lossy=WireCodec.INT8),
    *(
        Way(
            name=f"ps, PowerSGD rank {rank}",
            flags=f"--exchange=ps --compress=powersgd:{rank}",
            lossy=PlannedLowRank(rank=rank),
        )
        for rank in RANKS
    ),
    *(
        Way(name=f"ps, {h} local steps", flags=f"--exchange=ps --local_steps={h}", local_steps=h)
        for h in LOCAL_STEPS
    ),
    Way(name="DDP", exchange=PlannedExchange.RING),
    Way(name="DDP, fp16 hook", exchange=PlannedExchange.RING, lossy=WireCodec.HALF),
    *(
        Way(
            name=f"DDP, PowerSGD rank {rank}",
            exchange=PlannedExchange.RING,
            lossy=PlannedLowRank(rank=rank),
        )
        for rank in RANKS
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for one scheme.

    Attributes:
        iteration_s: seconds of an iteration.
        compute_s: the part of it in which the net itself computes.
        link_bytes: of an iteration over the busiest link in one direction.
        wire_s: the time of these bytes.
        by_factors: the layers whose weight travels as factors.
    """

    way: Way
    iteration_s: float
    compute_s: float
    link_bytes: float
    wire_s: float
    by_factors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The flags to choose.

    Attributes:
        flags: of the fastest exact way.
        alternatives: lossy ways that are faster, each with its flags and its gain.
    """

    flags: str
    reasons: tuple[str, ...]
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCluster:
    """The cluster to plan for.

    Attributes:
        workers: hosts with a worker.
        servers: hosts that only serve.
        costs: of each host; hosts on one machine have a part of its cores.
        virtual_workers: how many the job has; 0: one for each worker.
    """

    workers: int
    servers: int
    network: NetworkLinks
    costs: HostCosts
    virtual_workers: int = 0

    @property
    def placement(self) -> VirtualWorkers | None:
        """The virtual workers, divided evenly; None: one for each worker."""
        if not self.virtual_workers:
            return None
        return VirtualWorkers.spread(self.virtual_workers, [1.0] * self.workers)


def machine_of(cluster: PlannedCluster, shared_by: int = 1) -> Machine:
    """Return a host of the prediction.

    Args:
        shared_by: hosts that share one machine.
    """
    costs, network = cluster.costs, cluster.network
    cores = costs.free_cores / shared_by
    of_core = fields_of(costs, CoreCosts)
    if costs.gpu:
        of_core["optimizer_s_per_byte"] = 0.0
    return Machine(
        latency_s=network.latency_s,
        goodput=1.0 if network.measured else HEADERS,
        cores=cores,
        flops=GPU_FLOPS if costs.gpu else costs.flops * max(1.0, cores),
        products_on_device=bool(costs.gpu),
        **of_core,
    )


def forecast(
    training: Training, cluster: PlannedCluster, *, shared_by: int = 1
) -> list[Prediction]:
    """Return the predictions of all ways, in the order of `WAYS`."""
    scenario = _scenario(training, cluster, shared_by)
    return [_predicted(scenario, way) for way in WAYS]


def _scenario(training: Training, cluster: PlannedCluster, shared_by: int) -> Scenario:
    """Return the scenario: a worker computes for its virtual workers one after another."""
    scenario = Scenario(
        layers=training.layers,
        batch=training.batch,
        compute_s=training.compute_s,
        workers=cluster.workers,
        servers=cluster.servers,
        bits_per_s=cluster.network.bits_per_s,
        machine=machine_of(cluster, shared_by),
        virtual_workers=cluster.placement,
    )
    return replace(scenario, compute_s=training.compute_s * scenario.turns)


def _predicted(scenario: Scenario, way: Way) -> Prediction:
    servers = 0 if way.exchange is PlannedExchange.RING else scenario.servers
    own = replace(
        scenario,
        exchange=way.exchange,
        lossy=way.lossy,
        local_steps=way.local_steps,
        servers=servers,
        virtual_workers=scenario.virtual_workers if way.flags else None,  # DDP adds before it sends
    )
    if way.auto and scenario.workers > 1:
        own = _auto(scenario)
    size = link_bytes(own) if scenario.workers > 1 else 0.0
    return Prediction(
        way=way,
        iteration_s=predict(own),
        compute_s=own.compute_s,
        link_bytes=size,
        wire_s=size / own.bytes_per_s,
        by_factors=tuple(
            layer.name
            for layer, load in zip(own.layers, loads(own), strict=True)
            if load.factors is not None
        ),
    )


def _auto(scenario: Scenario) -> Scenario:
    """Return the scenario as `--exchange=auto` plans it: by time, but with virtual workers by
    bytes, as `hybrid` does, so that the plan depends on their number alone.
    """
    if scenario.virtual_workers is not None:
        return replace(scenario, exchange=PlannedExchange.HYBRID)
    return auto_scenario(scenario)


def recommend(cluster: PlannedCluster, found: Sequence[Prediction]) -> Recommendation:
    """Return the flags to choose, and why."""
    ours = [prediction for prediction in found if prediction.way.flags and prediction.way.exact]
    # the default is the first of `WAYS`
    best = ours[chosen([prediction.iteration_s for prediction in ours], default=0)]
    lossy = [
        prediction
        for prediction in found
        if prediction.way.flags
        and not prediction.way.exact
        and best.iteration_s > GAIN * prediction.iteration_s
    ]
    lossy.sort(key=lambda prediction: prediction.iteration_s)
    return Recommendation(
        flags=best.way.flags,
        reasons=tuple(_reasons(cluster, best, found)),
        alternatives=tuple((p.way.flags, best.iteration_s / p.iteration_s) for p in lossy),
    )


def chosen(seconds: Sequence[float], default: int | None) -> int:
    """Return the position of the shortest time, or `default` if its time is hardly longer.

    Args:
        seconds: an iteration by each scheme.
        default: position of the default; None: it is not among them.
    """
    fastest = min(range(len(seconds)), key=lambda index: seconds[index])
    if default is not None and seconds[default] <= seconds[fastest] * (1 + NEAR):
        return default
    return fastest


def _reasons(cluster: PlannedCluster, best: Prediction, found: Sequence[Prediction]) -> list[str]:
    if cluster.workers == 1:
        return ["One worker exchanges nothing between hosts."]
    reasons = [_limit(best)]
    if best.by_factors:
        ps = next(prediction for prediction in found if prediction.way.name == "ps")
        reasons.append(_factors(best, ps))
    elif best.way is DEFAULT:
        reasons.append("auto is the default. It sends no weight of this net as factors.")
    ddp = next(prediction for prediction in found if prediction.way.name == "DDP")
    reasons.append(
        f"DDP without a hook would take {ddp.iteration_s / best.iteration_s:.2f} times as long."
    )
    if not cluster.servers and best.wire_s > best.compute_s and not best.by_factors:
        reasons.append(
            "Hosts that only serve (role=server in the machinefile) would halve the bytes on each "
            "link."
        )
    return reasons


def _factors(best: Prediction, ps: Prediction) -> str:
    ours, theirs = (f"{prediction.link_bytes / 1e6:.1f} MB" for prediction in (best, ps))
    sentence = (
        f"The weights of {_listed(best.by_factors)} travel as factors: {ours} an iteration over a "
        "host's link"
    )
    if best.link_bytes < ps.link_bytes:
        return f"{sentence}, in place of {theirs}."
    return (
        f"{sentence}. ps sends only {theirs}, and takes {ps.iteration_s / best.iteration_s:.2f} "
        "times as long: its shards add and apply all gradients."
    )


def _limit(best: Prediction) -> str:
    part = best.compute_s / best.iteration_s
    if part >= BOUND_BY:
        return (
            f"The net's own computation is {part:.0%} of the iteration: the network hardly matters."
        )
    wire = best.wire_s / best.iteration_s
    if wire >= BOUND_BY:
        return f"The links limit the iteration: they are busy for {wire:.0%} of it, computation takes {part:.0%}."
    return (
        f"Computation takes {part:.0%} of the iteration, and the links are busy for {wire:.0%}: "
        "the rest is waiting for both in turn, and processors that send, sum and update."
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {counted(len(names) - 3, 'other layer')}"
