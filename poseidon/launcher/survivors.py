"""What is left of a job after a loss: the processes that have paused, and the hosts that the next
start has.

Law: pure, save for `PausedProcesses`, which holds the processes between two starts; none of them
outlives it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.events import Paused, encode_command
from poseidon.cluster.job_plan import JobPlan, ProcessName, Role
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import Listener, ProcessSpec

_Place = tuple[int, Role, int]
"""A host's id, a role, and the number of a process among those of its role on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """The hosts of the next start, which goes on from memory.

    Attributes:
        hosts: in the order of the ranks of their workers; the first has the memory snapshot.
        iteration: of that snapshot.
        lost: the hosts that are left out.
    """

    hosts: tuple[Host, ...]
    iteration: int
    lost: tuple[Host, ...]


def find_survivors(
    plan: JobPlan, paused: Mapping[ProcessName, Paused], *, min_workers: int
) -> Survivors | None:
    """Return what a job can go on with from memory; None: nothing that it needs is left.

    A host stays with all of its processes, or not at all: what it has lost is prepared beside the
    job. If no such host has a memory snapshot, one with all of its workers that has it stays, else
    one that has it; then the job waits for what is started anew there.

    Args:
        plan: of the start that has ended.
        paused: its processes that are left.
        min_workers: the fewest that the job goes on with.
    """
    live = [worker for worker in plan.workers if worker.process in paused]
    count = {host: sum(one.host is host for one in live) for host in plan.hosts}
    snapshots = {
        worker.host: snapshot
        for worker in live
        if worker.local_rank == 0 and (snapshot := paused[worker.process].snapshot) is not None
    }
    whole = [host for host in plan.hosts if count[host] == plan.workers_per_host]
    broken = {shard.host for shard in plan.shards if shard.process not in paused}
    unbroken = [host for host in whole if host not in broken]
    if any(host in snapshots for host in unbroken):
        whole = unbroken
    holders = [host for host in whole if host in snapshots] or list(snapshots)
    if not holders:
        return None
    newest = max(snapshots[host] for host in holders)
    first = next(host for host in holders if snapshots[host] == newest)
    serving = {shard.host for shard in plan.shards if shard.process in paused}
    left = [host for host in plan.hosts if (host in whole if host.works else host in serving)]
    hosts = (first, *(host for host in left if host != first))
    if sum(host.works for host in hosts) * plan.workers_per_host < min_workers:
        return None
    lost = tuple(host for host in plan.hosts if host not in hosts)
    return Survivors(hosts=hosts, iteration=newest, lost=lost)


class PausedProcesses:
    """The processes that wait for the next start of their job."""

    def __init__(self) -> None:
        self._started: dict[ProcessName, tuple[_Place, RemoteProcess]] = {}
        self._waiting: dict[_Place, RemoteProcess] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, spec: ProcessSpec, listener: Listener) -> RemoteProcess | None:
        """Let the process that waits in the place of a specification go on with its document;
        return it, or None if there is none.
        """
        process = self._waiting.pop(_place(spec), None)
        if process is None or process.poll() is not None:
            return None
        process.attach(spec.name, listener)
        process.send_line(encode_command("go_on", document=json.loads(spec.first_line)))
        self.started(spec, process)
        return process

    def started(self, spec: ProcessSpec, process: RemoteProcess) -> None:
        """Note a process of the start that runs."""
        self._started[spec.name] = _place(spec), process

    def add(self, spec: ProcessSpec, process: RemoteProcess) -> None:
        """Add a process that was prepared beside the start that runs."""
        self._waiting[_place(spec)] = process

    def keep(self, names: Iterable[ProcessName]) -> None:
        """Keep processes of the start that has ended."""
        self._waiting |= dict(self._started[name] for name in names)
        self._started.clear()

    def missing(self, specs: Iterable[ProcessSpec]) -> list[ProcessSpec]:
        """Return the specifications that no process of the start that runs, nor one that waits,
        has the place of.
        """
        live = [*self._started.values(), *self._waiting.items()]
        places = {place for place, process in live if process.poll() is None}
        return [spec for spec in specs if _place(spec) not in places]

    def end(self) -> None:
        """Kill all that wait."""
        for process in self._waiting.values():
            process.kill()
        self._waiting.clear()
        self._started.clear()

    def end_others(
        self, specs: Iterable[ProcessSpec], hosts: Iterable[Host]
    ) -> list[RemoteProcess]:
        """Kill those that wait and that the next start has no use for; return the others.

        A shard waits on: a job of one client has none, and needs it once there are two again.

        Args:
            specs: of the next start.
            hosts: that it has.
        """
        used, here = {_place(spec) for spec in specs}, {host.id for host in hosts}
        for place in [place for place in self._waiting if place not in used]:
            client, role, _ = place
            if role is not Role.SHARD or client not in here:
                self._waiting.pop(place).kill()
        return list(self._waiting.values())


def _place(spec: ProcessSpec) -> _Place:
    return spec.name.client, spec.name.role, spec.slot
