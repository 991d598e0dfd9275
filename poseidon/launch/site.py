"""The hosts of a job, as its launcher uses them: checked, sent files, and given processes to run.

Law: a job knows this interface only, never which implementation it has. Nothing starts anywhere
before all hosts were checked.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from poseidon.cluster.agent.launcher import AgentLauncher
from poseidon.cluster.host_checks import HostNeeds
from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.jobs.remote_hosts import SshAsk
from poseidon.cluster.local import LocalLauncher
from poseidon.cluster.machinefile import Host, read_machinefile
from poseidon.cluster.process import Launcher, Listener, ProcessSpec, RunningProcess
from poseidon.cluster.python_command import checkout
from poseidon.cluster.remote_python import LauncherEnvironment
from poseidon.cluster.ssh.config import SshSettings
from poseidon.launch.snapshots import SnapshotSource, WrittenHere
from poseidon.proto.shipped import portable

FileSet = Sequence[Path]
"""Files that a host needs in one folder."""


class SiteLauncher(Launcher, Protocol):
    """Starts processes on the hosts of a site, and knows what they find there."""

    def cores(self, host: Host) -> int:
        """Return how many CPUs the processes of a host may use: its part, where several hosts
        are one machine.
        """

    def socket_folder(self, host: Host) -> str:
        """Return a folder for the sockets among a host's workers, that only this user can enter."""

    def path(self, host: Host, path: Path) -> str:
        """Return where a host has a file of the launcher: where it was sent, else as
        `Site.path`.
        """

    def close(self) -> None:
        """End what still runs, and remove what was sent. May be called twice."""


class Site(ABC):
    """The hosts of a job."""

    opens_files_here = False
    """Whether processes open their files on the launcher's machine: then they are checked there."""

    @property
    @abstractmethod
    def hosts(self) -> tuple[Host, ...]:
        """One for each client; with the addresses at which hosts reach each other, once they
        were checked.
        """

    @property
    def recorded_hosts(self) -> tuple[Host, ...]:
        """The hosts in the job's record, which `poseidon ps` and `poseidon kill` ask over SSH."""
        return self.hosts

    def visible_gpus(self) -> int | None:
        """Return how many GPUs a host has; None where that is known only once the hosts were
        checked.
        """
        return None

    def path(self, path: Path) -> str:
        """Return how processes name a file of the launcher: relative, if it may be in their own
        working folder.
        """
        return portable(path)

    @abstractmethod
    def prepare(self, needs: Callable[[Host], HostNeeds]) -> None:
        """Check all hosts, before anything starts.

        Args:
            needs: returns what the processes of a host need; the site adds the addresses.

        Raises:
            JobError: lists the problems of all hosts.
        """

    @abstractmethod
    def launcher(self, record: JobRecord, files: Callable[[], Sequence[FileSet]]) -> SiteLauncher:
        """Return what starts a job's processes, once the hosts have what they need.

        Args:
            record: of the job.
            files: returns the files of the launcher that every worker needs, a folder for each set.

        Raises:
            JobInterrupted: a host is gone for now; a later start may succeed.
            JobError: another problem, on any host.
        """

    def snapshot_source(
        self, writer: Callable[[], Host], folder: Path, warn: Callable[[str], None]
    ) -> SnapshotSource:
        """Return what brings snapshots to the launcher.

        Args:
            writer: returns the host that writes them.
            folder: where copies go.
            warn: takes a sentence for each that could not be copied.
        """
        return WrittenHere()

    def drop_missing(self) -> tuple[Host, ...]:
        """Leave out the hosts that do not answer.

        Returns:
            Those hosts; none if all answer, or if no host that works would remain.
        """
        return ()

    def resume_command(self, command: str, changes: Mapping[str, str]) -> str:
        """Return how a user resumes the job.

        Args:
            command: resumes it, if the job was started by a command.
            changes: the flags in it that the job did not have: values by name.
        """
        return command

    def close(self) -> None:  # noqa: B027 - a site without connections has none to end
        """End all connections. May be called twice."""


class LocalSite(Site):
    """The launcher's own machine, whose processes are children of the launcher.

    Args:
        hosts: all with loopback addresses.
    """

    opens_files_here = True

    def __init__(self, hosts: tuple[Host, ...]) -> None:
        self._hosts = hosts

    @property
    def hosts(self) -> tuple[Host, ...]:
        """See `Site`."""
        return self._hosts

    def visible_gpus(self) -> int:
        """See `Site`."""
        import torch  # takes seconds to import, which most commands do without

        return torch.cuda.device_count()

    def path(self, path: Path) -> str:
        """See `Site`."""
        return str(path)

    def prepare(self, needs: Callable[[Host], HostNeeds]) -> None:
        """See `Site`. The job has checked its files already."""

    def launcher(self, record: JobRecord, files: Callable[[], Sequence[FileSet]]) -> SiteLauncher:
        """See `Site`. Files need not be sent."""
        return _LocalSiteLauncher(working=sum(host.works for host in self._hosts))


class _LocalSiteLauncher:
    """See `SiteLauncher`."""

    def __init__(self, working: int) -> None:
        self._launcher = LocalLauncher()
        self._working = working
        self._folders: dict[int, str] = {}

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> RunningProcess:
        """See `Launcher`."""
        return self._launcher.start(spec, host, listener)

    def cores(self, host: Host) -> int:
        """See `SiteLauncher`."""
        return max(1, (os.cpu_count() or 1) // self._working)

    def socket_folder(self, host: Host) -> str:
        """See `SiteLauncher`. The workers remove it once they are connected."""
        if host.id not in self._folders:
            self._folders[host.id] = tempfile.mkdtemp(prefix="poseidon-")
        return self._folders[host.id]

    def path(self, host: Host, path: Path) -> str:
        """See `SiteLauncher`."""
        return str(path)

    def close(self) -> None:
        """See `SiteLauncher`. Processes have ended with their `RunningProcess`."""
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)  # still there if the workers never connected
        self._folders.clear()


class AgentSiteLauncher:
    """The `SiteLauncher` of remote hosts, each with an agent.

    Args:
        agents: start the processes; closed with the launcher.
    """

    def __init__(self, agents: AgentLauncher) -> None:
        self.agents = agents
        self.sent: Mapping[int, Mapping[Path, str]] = {}
        """The path of each file that was sent, by the host's id."""

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> RunningProcess:
        """See `Launcher`."""
        return self.agents.start(spec, host, listener)

    def cores(self, host: Host) -> int:
        """See `SiteLauncher`."""
        return self.agents.cores(host)

    def socket_folder(self, host: Host) -> str:
        """See `SiteLauncher`. The workers make it."""
        return str(PurePosixPath(self.agents.scratch(host)) / f"client_{host.id}")

    def path(self, host: Host, path: Path) -> str:
        """See `SiteLauncher`."""
        return self.sent.get(host.id, {}).get(path) or portable(path)

    def close(self) -> None:
        """See `SiteLauncher`. Agents remove what was sent."""
        self.agents.close()


def launcher_environment() -> LauncherEnvironment:
    """Return where this process runs, for hosts with the same paths."""
    return LauncherEnvironment(python=sys.executable, checkout=checkout(), folder=os.getcwd())


def read_hosts(hostfile: str | None, channels: int) -> tuple[Host, ...]:
    """Return the hosts of a machinefile; this machine alone without one.

    Args:
        hostfile: the machinefile.
        channels: shards of each host.

    Raises:
        MachinefileError: a line is wrong.
    """
    if not hostfile:
        return (Host(id=0, address="127.0.0.1", port=0),)
    return read_machinefile(Path(hostfile), channels=channels)


def ask_over_ssh(config: str | None) -> SshAsk:
    """Return how `poseidon ps` and `poseidon kill` ask other hosts.

    Args:
        config: the file of --ssh_config.
    """
    return SshAsk(SshSettings.from_flag(config), launcher_environment())
