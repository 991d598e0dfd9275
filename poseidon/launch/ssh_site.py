"""The machines of a machinefile, reached over SSH: what a job asks of them, starts there and brings there.

Law: nothing starts anywhere before every host was asked and nothing is in the way of any. Connections last as long as the
job; one that broke is made anew for a new start.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from poseidon.cluster.agent.launcher import AgentLauncher
from poseidon.cluster.all_at_once import all_at_once
from poseidon.cluster.host_checks import ClientNeeds, Question, check_hosts
from poseidon.cluster.jobs.registry import JobRecord, record_fields
from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.cluster.name_lookup import addresses_of
from poseidon.cluster.ssh.config import SshConfig, SshSettings
from poseidon.cluster.ssh.connections import (
    SshHost,
    check_reached,
    close_all,
    connect_all,
    connect_each,
    listed,
    reached,
)
from poseidon.cluster.ssh.delivery import deliver, sent_file
from poseidon.cluster.ssh.launcher import HostEnvironment, open_agents
from poseidon.errors import JobError, JobInterrupted, UsageError
from poseidon.launch.site import launcher_environment

_ANSWER_S = 10.0
NAMES_S = 15.0
"""How long to wait for what the hosts' names mean, which may be known there alone."""


class LauncherKind(Enum):
    """What --launcher asks for."""

    AUTO = "auto"
    """Over SSH where a host is another machine."""
    LOCAL = "local"
    """On this machine."""
    SSH = "ssh"
    """Over SSH, also to this machine."""


def ssh_settings(flags: argparse.Namespace) -> SshSettings:
    """What the flags say of the connections."""
    return SshSettings(config=Path(flags.ssh_config) if flags.ssh_config else None)


def site_of(flags: argparse.Namespace, clients: tuple[Host, ...]) -> SshSite | None:
    """The site of a job's clients; None where its processes are children of the launcher.

    Raises:
        UsageError: the machines cannot be started in the way that is asked for, or not reach each other.
    """
    kind = LauncherKind(flags.launcher)
    far = [client for client in clients if not is_loopback(client.address)]
    if kind is LauncherKind.LOCAL and far:
        raise UsageError(
            f"--launcher=local starts processes on this machine only, and client {far[0].id} is on {far[0].address}"
        )
    if kind is LauncherKind.LOCAL or (kind is LauncherKind.AUTO and not far):
        return None
    near = [client for client in clients if is_loopback(client.address)]
    if far and near:
        raise UsageError(
            f"{flags.hostfile}: client {near[0].id} is on {near[0].address}, which the other machines cannot reach; "
            "expected a name or an address of this machine on their network"
        )
    return SshSite(clients, ssh_settings(flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """Files for the hosts.

    Attributes:
        files: which; those of one list come to lie in one folder.
    """

    files: tuple[Path, ...]


class SshSite:
    """See `poseidon.launch.site.Site`.

    Args:
        clients: of the machinefile.
        settings: of the connections.
    """

    def __init__(self, clients: tuple[Host, ...], settings: SshSettings) -> None:
        self._clients = clients
        self._settings = settings
        self._own = launcher_environment()
        self._hosts: dict[int, SshHost] = {}

    @property
    def clients(self) -> tuple[Host, ...]:
        """One for each line of the machinefile; with the address of each, once the site was prepared."""
        return self._clients

    def prepare(self, needs: Mapping[int, ClientNeeds]) -> None:
        """See `Site`; connects to all hosts first."""
        self._hosts = dict(connect_all(self._clients, self._settings))
        config = SshConfig(self._settings)
        dialled = {client.id: config.endpoint(client).host for client in self._clients}
        known = addresses_of({*dialled.values(), *(client.address for client in self._clients)}, NAMES_S)
        asked = {
            client.id: replace(needs[client.id], addresses=_names_of(client, dialled[client.id], known))
            for client in self._clients
        }
        places = self._places()
        first_of: dict[HostEnvironment, int] = {}
        for number, place in places.items():
            first_of.setdefault(place, number)
        addresses = check_hosts(
            [
                Question(
                    host=self._hosts[first_of[place]],
                    interpreter=place.interpreter(),
                    clients=tuple(asked[number] for number, other in places.items() if other == place),
                )
                for place in first_of
            ]
        )
        self._clients = tuple(replace(client, peer_address=addresses[client.id]) for client in self._clients)

    def host_of(self, client: Host) -> SshHost:
        """The connection to a client's host."""
        return self._hosts[client.id]

    def leave_out_missing(self) -> tuple[Host, ...]:
        """Forget the clients whose hosts do not answer.

        Returns:
            Those clients; none where all answer, or none that works would be left.
        """
        silent = self._silent()
        missing = tuple(client for client in self._clients if self._hosts[client.id] in silent)
        left = tuple(client for client in self._clients if client not in missing)
        if not any(client.works for client in left):
            return ()
        self._clients = left
        return missing

    def _silent(self) -> set[SshHost]:
        hosts = list({self._hosts[client.id] for client in self._clients})
        answers = all_at_once(_answers, hosts, name="poseidon ask")
        return {host for host, there in zip(hosts, answers, strict=True) if there is not True}

    def launcher(self, record: JobRecord) -> AgentLauncher:
        """See `Site`.

        Raises:
            JobInterrupted: a host is not there, or has no agent; it may come back.
        """
        try:
            self._reconnect()
            return open_agents(self._places(), record_fields(record), record.job)
        except JobError as error:
            # A line may stand that carries nothing any more, behind a jump host: the next start is to make it anew.
            close_all(self._silent())
            raise JobInterrupted(str(error), iteration=0, while_starting=True) from error

    def bring(
        self, shipments: Sequence[Shipment], launcher: AgentLauncher, clients: Iterable[Host]
    ) -> dict[int, dict[Path, str]]:
        """Bring files to clients, into the folders that their agents take away again.

        Returns:
            Where each file lies there, by the client's id.

        Raises:
            JobInterrupted: lists the hosts that could not take them.
        """
        sent = [[sent_file(path, "") for path in shipment.files] for shipment in shipments]
        places = self._places()

        def bring_one(client: Host) -> dict[Path, str]:
            scratch = launcher.scratch(client)
            files = [
                replace(file, remote=f"{scratch}/{client.id}/{number}/{file.local.name}")
                for number, shipment in enumerate(sent)
                for file in shipment
            ]
            host = self._hosts[client.id]
            deliver(files, host, name=host.words, python=places[client.id].interpreter())
            return {file.local: file.remote for file in files}

        chosen = list(clients)
        outcomes = all_at_once(bring_one, chosen, name="poseidon bring")
        problems = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
        if problems:
            raise JobInterrupted(listed(problems, of=len(chosen)), iteration=0, while_starting=True)
        return {
            client.id: outcome
            for client, outcome in zip(chosen, outcomes, strict=True)
            if not isinstance(outcome, JobError)
        }

    def close(self) -> None:
        """End all connections. May be called twice."""
        close_all(set(self._hosts.values()))
        self._hosts.clear()

    def _places(self) -> dict[int, HostEnvironment]:
        return {
            client.id: HostEnvironment(
                host=self._hosts[client.id], own=self._own, python=client.python, workdir=client.workdir
            )
            for client in self._clients
        }

    def _reconnect(self) -> None:
        """Make broken connections anew; those that can be made stay, whatever the others come to."""
        again = [client for client in self._clients if not self._hosts[client.id].alive]
        close_all({self._hosts[client.id] for client in again})
        outcomes = connect_each(again, self._settings)
        self._hosts.update(reached(outcomes))
        check_reached(outcomes)


def _answers(host: SshHost) -> bool:
    return host.run(["true"], timeout_s=_ANSWER_S).status == 0


def _names_of(client: Host, dialled: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """How a client's host may be called: as in the machinefile, as SSH dials it, and what these names mean here.

    Args:
        client: of the host.
        dialled: what SSH dials.
        known: the addresses of names.
    """
    names = [client.address, dialled]
    names += [address for name in (client.address, dialled) for address in known.get(name, ())]
    return tuple(name for name in dict.fromkeys(names) if name == client.address or not is_loopback(name))
