"""`poseidon plan`: predict the iteration time of every exchange on a cluster, and recommend flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from poseidon.base.hints import own_command
from poseidon.cli.doctor import UNITS, over_ssh
from poseidon.cli.progress_bar import progress_bar
from poseidon.cluster.machinefile import Host, has_remote_hosts, read_machinefile
from poseidon.cluster.ssh.settings import SshSettings
from poseidon.errors import JobError, UsageError
from poseidon.observe.plan.cluster_probe import (
    MOST_HOSTS,
    NetworkLinks,
    local_costs,
    probe_costs,
    probe_links,
)
from poseidon.observe.plan.costs import HostCosts
from poseidon.observe.plan.forecast import PlannedCluster, forecast, recommend
from poseidon.observe.plan.report import plan_fields, plan_lines
from poseidon.observe.plan.sources import Training, training_of_module, training_of_net
from ps_server.protocol.settings import MAX_WORKERS

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
        raise UsageError(f"{arguments.hostfile} has no host with a worker; expected one at least")
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
