"""The hosts of a job, as its launcher uses them: checked, sent files, and given processes to run.

Law: nothing starts anywhere before all hosts were checked. Agents last as long as the job; a lost
one is dialled again for a restart. What differs between kinds of hosts is in their dialer.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from poseidon.base.paths import portable
from poseidon.cluster.agent.delivery import SentFile, deliver, sent_file
from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.dial.dialer import (
    Dialer,
    LocalDialer,
    Needs,
    check_opened,
    close_agents,
    opened,
)
from poseidon.cluster.host_checks import check_hosts, check_limits
from poseidon.cluster.host_probe import Check
from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.jobs.remote_hosts import SshAgents, account_of
from poseidon.cluster.jobs.this_host import JobList
from poseidon.cluster.machinefile import Host, SshSettings, is_loopback, read_machinefile
from poseidon.cluster.process import Listener, ProcessSpec, for_each_host, format_problems
from poseidon.cluster.python_command import LauncherEnvironment, checkout
from poseidon.errors import JobError, JobInterrupted, JobKilled, UsageError
from poseidon.launcher.ray_hosts import ray_dialer, ray_hosts
from poseidon.launcher.request import JobRequest, LauncherKind
from poseidon.launcher.snapshots import SnapshotCopies
from poseidon.launcher.survivors import PausedProcesses

ANSWER_S = 10.0
FileSet = Sequence[Path]
"""Files that a host needs in one folder."""


class Site:
    """The hosts of a job.

    Args:
        hosts: in the order of their ids.
    """

    def __init__(self, hosts: Sequence[Host], dialer: Dialer) -> None:
        self.hosts = tuple(hosts)
        """One for each client; with the addresses at which hosts reach each other, once they were
        checked.
        """
        self._dialer = dialer
        self._job = ""
        self._needs: Needs | None = None
        self._agents: dict[int, RemoteAgent] = {}
        self._released: list[RemoteAgent] = []
        self._unchecked = False
        self._starts = 0
        self._sent: dict[int, dict[Path, SentFile]] = {}
        """The files of this start on each host that works, by its id and the launcher's paths."""
        self.paused = PausedProcesses()
        """The processes that wait for the next start."""
        self.let_leave: Callable[[Sequence[Host]], bool] = lambda _: False
        """Lets hosts leave the job that are asked to end; returns False if they cannot. Called on
        threads of their agents.
        """

    @property
    def recorded_hosts(self) -> tuple[Host, ...]:
        """The hosts in the job's record, which `poseidon ps` and `poseidon kill` ask over SSH."""
        return () if self._dialer.moves else self.hosts

    @property
    def takes_back(self) -> bool:
        """Whether a lost host may come back."""
        return not self._dialer.given

    @property
    def takes_others(self) -> bool:
        """Whether a host may join that it has not had."""
        return not (self._dialer.given or self._dialer.moves)

    @property
    def opens_files_here(self) -> bool:
        """Whether processes open their files on the launcher's machine: then they are checked
        there.
        """
        return self._dialer.here

    def visible_gpus(self) -> int | None:
        """Return how many GPUs a host has; None where that is known only once the hosts were
        checked.
        """
        if not self._dialer.here:
            return None
        import torch  # takes seconds to import, which most commands do without

        return torch.cuda.device_count()

    def path(self, path: Path) -> str:
        """Return how processes name a file of the launcher: relative, if it may be in their own
        working folder.
        """
        return str(path) if self._dialer.here else portable(path)

    def prepare(self, job: str, needs: Needs) -> None:
        """Open the agents of all hosts and check the hosts, before anything starts.

        Args:
            needs: returns what the processes of a host need; the site adds the addresses.

        Raises:
            JobError: lists the problems of all hosts; or this machine cannot launch so many.
        """
        self._job, self._needs = job, needs
        if not self._dialer.here:
            check_limits(len(self.hosts), needs(self.hosts[0]).peers)
        self._dialer.place(self.hosts, needs)
        self._dial(self.hosts)
        self._check()

    def begin(self, record: JobRecord | None, files: Sequence[FileSet] = ()) -> None:
        """Make the hosts ready for one start of the job.

        Args:
            record: of the job; None: the hosts have no record of it.
            files: of the launcher, that every worker needs, a folder for each set.

        Raises:
            JobInterrupted: a host is gone for now; a later start may succeed.
            JobError: another problem, on any host; `JobKilled` where the user has killed the job
                there since the last start.
        """
        for agent in self._agents.values():
            if agent.killed_by_user:
                raise JobKilled(f"{agent.label}: {agent.lost}")
        try:
            self._dial_lost()
        except JobError as error:
            if self._dialer.given:
                raise
            raise JobInterrupted(str(error), iteration=0, while_starting=True) from error
        self._starts += 1
        if record is not None and not self._dialer.here:
            known = record.for_agents()
            for agent in self._distinct_agents():
                agent.register(known)
        if self._dialer.takes_files:
            self._send([[sent_file(path, "") for path in paths] for paths in files])

    def import_ahead(
        self, environments: Mapping[Host, Mapping[str, str]], imports: Sequence[str]
    ) -> Sequence[threading.Event]:
        """Let hosts import modules for processes; return at once what is set when they have.

        Args:
            environments: of the processes of each host, as `ProcessSpec` has them.
        """
        return [
            self._agents[host.id].import_ahead(environment, imports)
            for host, environment in environments.items()
        ]

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> RemoteProcess:
        """Ask a host to start a process, or let one that waits there continue; see `run_job`."""
        waiting = self.paused.take(spec, listener)
        if waiting is not None:
            return waiting
        process = self._agents[host.id].begin_start(spec, listener)
        self.paused.started(spec, process)
        return process

    def reach(
        self, host: Host, record: JobRecord, needs: Needs, files: Sequence[FileSet] = ()
    ) -> Host:
        """Connect a host that the start that runs has not, check it, and send it files; return it,
        with the address at which the others reach it. Another thread may call it.

        Args:
            needs: returns what the processes of the host need.
            files: of those of `begin`.

        Raises:
            JobError: it cannot be reached, or lacks something; or a file has changed.
        """
        if not self._is_lost(host):
            return host
        present = [agent for agent in self._distinct_agents() if agent.lost is None][:1]
        check_opened(self._open([host]))
        (host,) = self._dialer.located([host])
        if self._dialer.here:
            return host
        self._agents[host.id].register(record.for_agents())
        try:
            (host,) = self._checked([host], needs, *present)
            if files and self._dialer.takes_files:
                self._send_to(host, self._unchanged(files))
        except JobError:
            self.release([host.id])
            raise
        return host

    def start_aside(self, spec: ProcessSpec, host: Host, listener: Listener) -> RemoteProcess:
        """Start a process that waits for the next start, beside the start that runs."""
        return self._agents[host.id].start(spec, listener)

    def has_processes(self, host: Host) -> bool:
        """Return whether processes of the job run on the machine of a host; asks its agent.

        Raises:
            JobError: it has no answer.
        """
        listed = self._agents[host.id].ask_for(JobList, Service.LIST)
        return any(job.record.job == self._job and job.living for job in listed.jobs)

    def release(self, hosts: Iterable[int]) -> None:
        """Let the agents of hosts outside the job go, by the hosts' ids; return at once."""
        agents = {self._agents.pop(host) for host in hosts if host in self._agents}
        for agent in agents - set(self._agents.values()):
            agent.dismiss()
            self._released.append(agent)

    def go_on(self, hosts: Sequence[Host]) -> None:
        """Use these hosts for the next start, in this order; processes wait on them."""
        self.hosts = tuple(hosts)
        self._starts += 1

    def cores(self, host: Host) -> int:
        """Return how many CPUs the processes of a host may use: its part, where several hosts are
        one machine.
        """
        agent = self._agents[host.id]
        sharing = sum(each.works and self._agents[each.id] is agent for each in self.hosts)
        return self._dialer.cores(host, max(1, agent.welcome.cores // max(1, sharing)))

    def socket_folder(self, host: Host) -> str:
        """Return a folder for the sockets among a host's workers, which make it; only this user can
        enter it.
        """
        return f"{self._agents[host.id].welcome.scratch}/sockets_{host.id}_{self._starts}"

    def sent_path(self, host: Host, path: Path) -> str:
        """Return where a host has a file of the launcher: where it was sent, else as `path`."""
        sent = self._sent.get(host.id, {}).get(path)
        return self.path(path) if sent is None else sent.remote

    def sources(self, host: Host) -> dict[str, str]:
        """Return where the launcher has each file that was sent to a host, by its path there."""
        sent = self._sent.get(host.id, {})
        return {file.remote: str(path) for path, file in sent.items()}

    def end(self) -> None:
        """End what still runs of this start, and remove what was sent for it; nothing where
        processes wait for the next start.
        """
        if self.paused:
            return
        self._sent = {}
        for_each_host(RemoteAgent.end_all, self._distinct_agents(), name="poseidon agent end")

    def snapshot_copies(
        self, writer: Callable[[], Host], folder: Path, warn: Callable[[str], None]
    ) -> SnapshotCopies | None:
        """Return what copies snapshots to the launcher; None where they stay as they are written.

        Args:
            writer: returns the host that writes them.
        """
        if not self._dialer.takes_files:
            return None
        return SnapshotCopies(folder, lambda: self._agents[writer().id], warn)

    def drop_missing(self) -> tuple[Host, ...]:
        """Leave out the hosts that do not answer. Return them; none if all answer, or if no host
        that works would remain.
        """
        agents = self._distinct_agents()
        heard = for_each_host(lambda agent: agent.is_heard(ANSWER_S), agents, name="poseidon ask")
        silent = {agent for agent, up in zip(agents, heard, strict=True) if up is not True}
        missing = tuple(host for host in self.hosts if self._agents.get(host.id) in (None, *silent))
        left = tuple(host for host in self.hosts if host not in missing)
        if not missing or not any(host.works for host in left):
            return ()
        self.hosts = left
        if self._dialer.moves:  # so that no autoscaler brings a node for a client that was left out
            self._close_agents(self._agents.values())
            assert self._needs is not None
            self._dialer.place(left, self._needs)
        return missing

    def resume_command(self, command: str, changes: Mapping[str, str]) -> str:
        """See `Dialer.resume_command`."""
        return self._dialer.resume_command(command, changes)

    def close(self) -> None:
        """End all agents. May be called twice."""
        self._close_agents([*self._agents.values(), *self._released])
        self._agents.clear()
        self._released.clear()
        self._dialer.close()

    def _check(self) -> None:
        if not self._dialer.here:  # otherwise the job has checked its files already
            assert self._needs is not None
            self.hosts = self._checked(self.hosts, self._needs)

    def _checked(
        self, hosts_: Sequence[Host], needs: Needs, *alike: RemoteAgent
    ) -> tuple[Host, ...]:
        """Check hosts, and that they have torch in common with the agents of others; return them
        with their addresses.
        """
        names = self._dialer.names(hosts_)
        asked: dict[RemoteAgent, list[Host]] = {}
        for host in hosts_:
            asked.setdefault(self._agents[host.id], []).append(host)
        checks = [(agent, Check()) for agent in alike]
        for agent, hosts in asked.items():
            clients = tuple(replace(needs(host), addresses=names[host.id]) for host in hosts)
            checks.append((agent, Check(clients=clients, job=self._job)))
        addresses = check_hosts(checks)
        return tuple(replace(host, peer_address=addresses[host.id]) for host in hosts_)

    def _dial(self, hosts: Sequence[Host]) -> None:
        """Open the agents of hosts; those that can be opened stay, even if others cannot."""
        outcomes = self._open(hosts)
        self.hosts = self._dialer.located(self.hosts)
        check_opened(outcomes)

    def _open(self, hosts: Sequence[Host]) -> Mapping[int, RemoteAgent | JobError]:
        outcomes = self._dialer.dial(hosts, self._job)
        for host, agent in opened(outcomes).items():
            agent.leave = partial(self._leave, agent)
            self._agents[host] = agent
        return outcomes

    def _leave(self, agent: RemoteAgent) -> bool:
        """Let the hosts of an agent leave the job; see `RemoteAgent.leave`."""
        hosts = [host for host in self.hosts if self._agents.get(host.id) is agent]
        return bool(hosts) and self.let_leave(hosts)

    def is_killed(self, host: Host) -> bool:
        """Return whether the user has killed the job on a host."""
        agent = self._agents.get(host.id)
        return agent is not None and agent.killed_by_user

    def _dial_lost(self) -> None:
        """Dial lost agents again, and check what may be another machine now.

        Agents that stand but say nothing any more, as behind a jump host, are dialled again by
        the next start.
        """
        lost = [host for host in self.hosts if self._is_lost(host)]
        if lost:
            self._close_agents(self._agents[host.id] for host in lost if host.id in self._agents)
            self._unchecked = self._dialer.moves
            self._dial(lost)
        if self._unchecked:
            self._check()
            self._unchecked = False

    def _distinct_agents(self) -> list[RemoteAgent]:
        """Return the agents, each once: hosts may share one."""
        return list(dict.fromkeys(self._agents.values()))

    def _is_lost(self, host: Host) -> bool:
        agent = self._agents.get(host.id)
        return agent is None or agent.lost is not None or agent.closed

    def _unchanged(self, sets: Sequence[FileSet]) -> Sequence[Sequence[SentFile]]:
        """Return the files of this start at these paths, which have the same content still."""
        known = {path: file for sent in self._sent.values() for path, file in sent.items()}
        for path in (path for paths in sets for path in paths):
            if sent_file(path, "").sha256 != known[path].sha256:
                raise JobError(
                    f"{path} has changed since the job started, so this host would compute "
                    "something else; restore the file"
                )
        return [[known[path] for path in paths] for paths in sets]

    def _send(self, sets: Sequence[Sequence[SentFile]]) -> None:
        self._sent = {}
        working = [host for host in self.hosts if host.works and sets]
        outcomes = for_each_host(
            lambda host: self._send_to(host, sets), working, name="poseidon send"
        )
        problems = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
        if problems:
            raise JobInterrupted(
                format_problems(problems, of=len(working)), iteration=0, while_starting=True
            )

    def _send_to(self, host: Host, sets: Sequence[Sequence[SentFile]]) -> None:
        """Send files to a host, into a folder of this start, which its agent removes."""
        agent = self._agents[host.id]
        scratch = PurePosixPath(agent.welcome.scratch) / f"client_{host.id}_{self._starts}"
        files = [
            replace(file, remote=str(scratch / str(number) / file.local.name))
            for number, group in enumerate(sets)
            for file in group
        ]
        deliver(files, agent, name=agent.label)
        self._sent[host.id] = {file.local: file for file in files}

    def _close_agents(self, agents: Iterable[RemoteAgent]) -> None:
        if not self._dialer.given:
            close_agents(agents)


def site_of(request: JobRequest) -> Site:
    """Return the hosts of a job's machinefile: on this machine, over SSH, or through Ray.

    Raises:
        MachinefileError: a line is wrong.
        UsageError: the machines cannot be started as --launcher asks, or cannot reach each other.
    """
    if request.launcher is LauncherKind.RAY:
        hosts = ray_hosts(request)
        return Site(hosts, ray_dialer(request, hosts))
    hosts = read_hosts(request.hostfile, request.shards)
    remote = [host for host in hosts if not host.is_here]
    if request.launcher is LauncherKind.LOCAL and remote:
        raise UsageError(
            f"--launcher=local starts processes on this machine only, but client {remote[0].id} is "
            f"on {remote[0].name}"
        )
    if request.launcher is LauncherKind.LOCAL or (
        request.launcher is LauncherKind.AUTO and not remote
    ):
        _check_local(hosts, request.hostfile)
        return Site(hosts, LocalDialer())
    local = [host for host in hosts if is_loopback(host.address)]
    if 0 < len(local) < len(hosts):
        raise UsageError(
            f"{request.hostfile}: client {local[0].id} is on {local[0].address}, which the other "
            "machines cannot reach; use this machine's name or address on their network"
        )
    # imports paramiko, a quarter of the launcher's start, which a job on this machine does not need
    from poseidon.cluster.dial.ssh import SshDialer

    return Site(hosts, SshDialer(SshSettings(config=request.ssh_config), launcher_environment()))


def _check_local(hosts: Sequence[Host], hostfile: str | None) -> None:
    """Raise UsageError for options without effect: processes run as the launcher does."""
    for host in hosts:
        for option in ("python", "workdir"):
            if getattr(host, option) is not None:
                raise UsageError(
                    f"{hostfile}: client {host.id} is this machine and is started without SSH, so "
                    f"{option}= has no effect; use --launcher=ssh, or leave out {option}="
                )


def launcher_environment() -> LauncherEnvironment:
    """Return where this process runs, for hosts with the same paths."""
    return LauncherEnvironment(python=sys.executable, checkout=checkout(), folder=os.getcwd())


def read_hosts(hostfile: str | None, channels: int) -> tuple[Host, ...]:
    """Return the hosts of a machinefile; this machine alone without one.

    Raises:
        MachinefileError: a line is wrong.
    """
    if not hostfile:
        return (Host(id=0, address="127.0.0.1", port=0),)
    return read_machinefile(Path(hostfile), channels=channels)


def ssh_agents(config: str | None, records: Sequence[JobRecord] = ()) -> SshAgents:
    """Return the agents of other hosts, for `poseidon ps` and `poseidon kill`.

    Args:
        config: the file of --ssh_config; None: each job's own.
    """
    own = {
        account_of(host): SshSettings.from_flag(record.ssh_config)
        for record in (() if config else records)
        if record.ssh_config is not None
        for host in record.all_hosts
    }
    return SshAgents(SshSettings.from_flag(config), launcher_environment(), own)
