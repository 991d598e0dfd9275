"""The clients of a job on the nodes of a Ray cluster: how many, and what each asks of its node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from poseidon.cluster.dial.dialer import Needs
from poseidon.cluster.dial.ray import RayDialer
from poseidon.cluster.dial.ray_resources import ANY, Resources, parse_resources
from poseidon.cluster.machinefile import Host, HostRole, read_machinefile
from poseidon.errors import UsageError
from poseidon.launcher.request import JobRequest


def ray_dialer(request: JobRequest, hosts: tuple[Host, ...]) -> RayDialer:
    """Return the dialer of a job's clients.

    Raises:
        UsageError: a flag is wrong.
    """
    of_clients = parse_resources(request.ray_resources, "--launcher=ray:resources")
    of_servers = parse_resources(request.ray_server_resources, "--launcher=ray:server_resources")
    return RayDialer(
        hosts,
        address=request.ray_address,
        timeout_s=request.ray_timeout,
        folder=os.getcwd(),
        resources=lambda host, needs: _resources(request, host, needs, of_clients, of_servers),
        warn=lambda sentence: print(sentence, file=sys.stderr),
    )


def _resources(
    request: JobRequest, host: Host, needs: Needs, of_clients: Resources, of_servers: Resources
) -> Resources:
    if not host.works:
        return _some(
            {"CPU": float(request.shards), **of_servers},
            "--launcher=ray:server_resources",
        )
    devices = needs(host).devices
    if devices and sorted(devices) != list(range(len(devices))):
        numbers = ",".join(map(str, devices))
        raise UsageError(
            f"client {host.id} has GPUs {numbers}; Ray assigns GPUs and numbers them from 0, so "
            f"{len(devices)} of them are {','.join(map(str, range(len(devices))))}"
        )
    workers = len(devices) or host.workers or request.workers
    usual = {"CPU": float(workers * (request.threads or 1))}
    return _some(
        {**usual, **({"GPU": float(len(devices))} if devices else {}), **of_clients},
        "--launcher=ray:resources",
    )


def ray_hosts(request: JobRequest) -> tuple[Host, ...]:
    """Return the clients of the machinefile, else as many as the flags ask for."""
    if not request.hostfile:
        working = request.clients or 1
        return tuple(
            Host(
                id=number,
                address=ANY,
                port=0,
                role=HostRole.BOTH if number < working else HostRole.SERVER,
            )
            for number in range(working + request.servers)
        )
    hosts = read_machinefile(Path(request.hostfile), channels=request.shards)
    for host in hosts:
        for option, value in (("user", host.user), ("ssh_port", host.ssh_port)):
            if value is not None:
                raise UsageError(
                    f"{request.hostfile}: client {host.id} has {option}={value}, which is for SSH; "
                    "leave it out with --launcher=ray"
                )
    return hosts


def _some(resources: Resources, flag: str) -> Resources:
    """Return the resources of a client; Ray refuses a bundle of none."""
    if not any(resources.values()):
        raise UsageError(
            f"{flag}: a client must ask for a resource above 0 of its node, such as CPU=1"
        )
    return resources
