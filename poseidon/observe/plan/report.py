"""The text and the JSON of a plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from poseidon.base.text_columns import aligned
from poseidon.errors import counted
from poseidon.observe.plan.costs import HostCosts
from poseidon.observe.plan.forecast import PlannedCluster, Prediction, Recommendation
from poseidon.observe.plan.shapes import elements
from poseidon.observe.plan.sources import Training

HEAD = ("scheme", "exact", "iteration ms", "compute", "MB on a link", "x DDP")


def plan_lines(
    training: Training,
    cluster: PlannedCluster,
    found: Sequence[Prediction],
    chosen: Recommendation,
    notes: Sequence[str],
) -> list[str]:
    """Return the lines that `poseidon plan` prints."""
    network, costs = cluster.network, cluster.costs
    ddp = next(prediction.iteration_s for prediction in found if prediction.way.name == "DDP")
    rows = [HEAD]
    for prediction in sorted(found, key=lambda each: each.iteration_s):
        rows.append(
            (
                prediction.way.name,
                "yes" if prediction.way.exact else "no",
                f"{1e3 * prediction.iteration_s:.1f}",
                f"{prediction.compute_s / prediction.iteration_s:.0%}",
                f"{prediction.link_bytes / 1e6:.2f}",
                f"{ddp / prediction.iteration_s:.2f}",
            )
        )
    servers = f" and {cluster.servers} that only serve" if cluster.servers else ""
    return [
        f"{training.name}: {elements(training.layers) / 1e6:.1f} M parameters, batch "
        f"{training.batch}, compute {1e3 * training.compute_s:.1f} ms",
        f"{counted(cluster.workers, 'host')}{servers}, links of {network.bits_per_s / 1e6:.0f} Mbit/s "
        f"({'measured' if network.measured else 'given'}), {1e3 * network.latency_s:.2f} ms from "
        f"host to host, {costs.cores} cores{_free(costs)}{f', {costs.gpu}' if costs.gpu else ''}",
        *_virtual_workers(cluster),
        "",
        *aligned(rows, left=1),
        "",
        f"Recommended: {chosen.flags}",
        *(f"  {reason}" for reason in chosen.reasons),
        *(
            f"  Lossy and {gain:.1f} times as fast: {flags}; compare losses before you rely on it."
            for flags, gain in chosen.alternatives
        ),
        *([""] if notes else []),
        *(f"note: {note}" for note in notes),
    ]


def plan_fields(
    training: Training,
    cluster: PlannedCluster,
    found: Sequence[Prediction],
    chosen: Recommendation,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the plan as JSON has it; times are seconds, sizes bytes."""
    return {
        "version": 1,
        "net": training.name,
        "parameters": elements(training.layers),
        "batch": training.batch,
        "compute_s": training.compute_s,
        "workers": cluster.workers,
        "servers": cluster.servers,
        "virtual_workers": cluster.virtual_workers or cluster.workers,
        "network": asdict(cluster.network),
        "costs": asdict(cluster.costs),
        "schemes": [
            {
                "name": prediction.way.name,
                "flags": prediction.way.flags,
                "exact": prediction.way.exact,
                "iteration_s": prediction.iteration_s,
                "link_bytes": prediction.link_bytes,
            }
            for prediction in found
        ],
        "recommended": chosen.flags,
        "reasons": list(chosen.reasons),
        "lossy": [{"flags": flags, "gain": gain} for flags, gain in chosen.alternatives],
        "notes": list(notes),
    }


def _virtual_workers(cluster: PlannedCluster) -> list[str]:
    """Return a line on how many virtual workers each host computes for, and what that costs."""
    placed = cluster.placement
    if placed is None:
        return []
    hosts = range(placed.processes)
    numbers = [len(placed.of(host)) for host in hosts]
    sums = max(len(placed.nodes(host)) for host in hosts)
    fewest = "" if min(numbers) == max(numbers) else f"{min(numbers)} or "
    own = "" if placed.is_one_each else " (with local steps values and histories for each)"
    return [
        f"{placed.count} virtual workers: {fewest}{max(numbers)} on each host, one after another, "
        f"with one copy of the parameters{own}; at most {counted(sums, 'sum')} of each tensor's "
        "gradients leave a host"
    ]


def _free(costs: HostCosts) -> str:
    """Return how many cores other work on the host leaves, if not all."""
    return f" ({costs.free_cores:.1f} of them free)" if costs.free_cores < costs.cores else ""
