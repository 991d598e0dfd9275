"""The machines of a meeting as those of a job; see `poseidon.cluster.rendezvous.server`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from poseidon.cluster.host_checks import ClientNeeds, Question, check_hosts
from poseidon.cluster.jobs.registry import JobRecord, record_fields
from poseidon.cluster.machinefile import Host
from poseidon.cluster.rendezvous.hosts import HostPlan
from poseidon.cluster.rendezvous.remote_host import MetHost
from poseidon.cluster.ssh.launcher import HostEnvironment, open_agents
from poseidon.errors import UsageError
from poseidon.launch.site import ClosingLauncher, launcher_environment


class MetSite:
    """A `Site`: one client for each host, agents over the meeting's lines.

    Args:
        hosts: as the meeting has gathered them.
    """

    def __init__(self, hosts: Sequence[tuple[HostPlan, MetHost]]) -> None:
        self._hosts = tuple(hosts)

    @property
    def clients(self) -> tuple[Host, ...]:
        """One for each host, by rank; their shards take free ports."""
        return tuple(
            Host(id=number, address=plan.address, port=0) for number, (plan, _) in enumerate(self._hosts)
        )

    def prepare(self, needs: Mapping[int, ClientNeeds]) -> None:
        """See `Site`; a host's address is the one that its task has told."""
        places = self._places()
        check_hosts(
            [
                Question(
                    host=host,
                    interpreter=places[number].interpreter(),
                    clients=(replace(needs[number], addresses=(plan.address,)),),
                )
                for number, (plan, host) in enumerate(self._hosts)
            ]
        )

    def launcher(self, record: JobRecord) -> ClosingLauncher:
        """An agent on each host; see `Site`."""
        return open_agents(self._places(), record_fields(record), record.job)

    def close(self) -> None:
        """Nothing: the meeting ends with its own block."""

    def _places(self) -> dict[int, HostEnvironment]:
        own = launcher_environment()
        return {
            number: HostEnvironment(host=host, own=own, python=plan.python, workdir=plan.folder)
            for number, (plan, host) in enumerate(self._hosts)
        }


def share_out_devices(flags: argparse.Namespace, tasks: int) -> None:
    """Several tasks on each host are as many workers there; their devices are told by flags as anywhere else.

    Args:
        flags: of the job; changed.
        tasks: on each host. One alone leaves the flags as they are.

    Raises:
        UsageError: the flags ask for another number of workers.
    """
    if tasks == 1:
        return
    if not flags.gpu:
        if flags.num_app_threads not in (1, tasks):
            raise UsageError(
                f"--num_app_threads={flags.num_app_threads} with {tasks} tasks on each host; expected {tasks}, or one task"
            )
        flags.num_app_threads = tasks
    elif flags.gpu == "all":
        flags.gpu = ",".join(map(str, range(tasks)))
    elif flags.gpu.count(",") + 1 != tasks:
        raise UsageError(
            f"--gpu={flags.gpu} with {tasks} tasks on each host; expected as many devices, or all"
        )
