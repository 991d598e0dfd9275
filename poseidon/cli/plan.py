"""`poseidon plan`: predict the iteration time of every exchange on a cluster, and recommend flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from poseidon.base.paths import own_command
from poseidon.base.text_files import aligned
from poseidon.cli.doctor import UNITS, over_ssh
from poseidon.cli.progress_bar import progress_bar
from poseidon.cluster.machinefile import Host, SshSettings, has_remote_hosts, read_machinefile
from poseidon.errors import JobError, UsageError, counted
from poseidon.observe.plan.cluster_probe import (
    MOST_HOSTS,
    NetworkLinks,
    local_costs,
    probe_costs,
    probe_links,
)
from poseidon.observe.plan.costs import HostCosts
from poseidon.observe.plan.forecast import (
    PlannedCluster,
    Prediction,
    Recommendation,
    forecast,
    recommend,
)
from poseidon.observe.plan.shapes import elements
from poseidon.observe.plan.sources import Training, training_of_module, training_of_net
from ps_server.protocol.settings import MAX_WORKERS

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


LATENCY_S = 50e-6
"""Assumed from host to host in a local network."""
ONE_MACHINE = NetworkLinks(bits_per_s=20e9, latency_s=20e-6, measured=False)
"""Assumed between processes of one machine."""


def run_plan(arguments: argparse.Namespace) -> int:
    """Measure, predict, print; 0 when done."""
    notes: list[str] = []
    training = _training(arguments)
    notes += training.notes
    cluster, shared_by = _cluster(arguments, notes)
    if arguments.virtual_workers:
        if not cluster.workers <= arguments.virtual_workers <= MAX_WORKERS:
            raise UsageError(
                f"--virtual_workers={arguments.virtual_workers} with {cluster.workers} hosts: each "
                f"host computes for at least one; expected {cluster.workers} to {MAX_WORKERS}"
            )
        cluster = replace(cluster, virtual_workers=arguments.virtual_workers)
    found = forecast(training, cluster, shared_by=shared_by)
    chosen = recommend(cluster, found)
    if arguments.json:
        print(json.dumps(plan_fields(training, cluster, found, chosen, notes), indent=1))
    else:
        print("\n".join(plan_lines(training, cluster, found, chosen, notes)))
    return 0


def _training(arguments: argparse.Namespace) -> Training:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute_s = arguments.compute / 1000 if arguments.compute else None
    if arguments.module:
        return training_of_module(arguments.module, compute_s=compute_s, device=device)
    return training_of_net(
        Path(arguments.solver or arguments.net),
        compute_s=compute_s,
        device=device,
        is_solver=bool(arguments.solver),
    )


def _cluster(arguments: argparse.Namespace, notes: list[str]) -> tuple[PlannedCluster, int]:
    """Return the cluster, and the number of its hosts that share one machine."""
    latency_s = LATENCY_S if arguments.latency is None else arguments.latency / 1000
    given = NetworkLinks(
        bits_per_s=(arguments.rate or 0.0) * 1e6, latency_s=latency_s, measured=False
    )
    if not arguments.hostfile:
        notes.append("the hosts' processors are taken to be as fast as this machine's")
        return _planned(arguments.hosts, arguments.servers, given, local_costs(1)), 1
    hosts = read_machinefile(Path(arguments.hostfile))
    workers = sum(host.works for host in hosts)
    if not workers:
        raise UsageError(f"{arguments.hostfile} has no host with a worker")
    servers = len(hosts) - workers
    if not has_remote_hosts(hosts):
        shared = "all hosts of the machinefile are this machine: they share its processors"
        notes.append(
            shared if arguments.rate else f"{shared}, and 20 Gbit/s are assumed between them"
        )
        network = given if arguments.rate else ONE_MACHINE
        return _planned(workers, servers, network, local_costs(len(hosts))), len(hosts)
    network, costs, shared_by = _probed(arguments, hosts, given if arguments.rate else None, notes)
    return _planned(workers, servers, network, costs), shared_by


def _planned(workers: int, servers: int, network: NetworkLinks, costs: HostCosts) -> PlannedCluster:
    return PlannedCluster(workers=workers, servers=servers, network=network, costs=costs)


def _probed(
    arguments: argparse.Namespace,
    hosts: Sequence[Host],
    given: NetworkLinks | None,
    notes: list[str],
) -> tuple[NetworkLinks, HostCosts, int]:
    """Measure the hosts of a machinefile. The last value is the most clients of one host."""
    problems: list[tuple[str, str]] = []
    with ExitStack() as stack:
        report = stack.enter_context(progress_bar(arguments.progress, UNITS))
        subjects = stack.enter_context(
            over_ssh(hosts, SshSettings.from_flag(arguments.ssh_config), problems)
        )
        if problems:
            raise JobError(
                f"{problems[0][0]}: {problems[0][1]}; {own_command()} doctor --hostfile names all "
                "problems"
            )
        costs = probe_costs(subjects)
        shared_by = max(len(subject.clients) for subject in subjects)
        if given is not None:
            return given, costs, shared_by
        if len(subjects) < 2:
            notes.append(
                "all clients of the machinefile are on one host: 20 Gbit/s are assumed between them"
            )
            return ONE_MACHINE, costs, shared_by
        if len(subjects) > MOST_HOSTS:
            notes.append(
                f"links were measured between the first {MOST_HOSTS} of {len(subjects)} hosts"
            )
        return probe_links(subjects, arguments.seconds, report), costs, shared_by
