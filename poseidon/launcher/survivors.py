"""What is left of a job after a loss: the processes that have paused, and the hosts that the next
start has.

Law: pure, save for `PausedProcesses`, which holds the processes between two starts; none of them
outlives it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.events import Paused, encode_command
from poseidon.cluster.job_plan import JobPlan, ProcessName, Role, ShardPlan, WorkerPlan
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.errors import JobError

_Place = tuple[int, Role, int]
"""A host's id, a role, and the number of a process among the processes of its role on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """The hosts of the next start, which continues from memory.

    Attributes:
        hosts: in the order of the ranks of their workers; the first has the memory snapshot.
        iteration: of that snapshot.
    """

    hosts: tuple[Host, ...]
    iteration: int
    lost: tuple[Host, ...]


def find_survivors(
    plan: JobPlan,
    paused: Mapping[ProcessName, Paused],
    *,
    min_workers: int,
    leaving: Set[int] = frozenset(),
) -> Survivors | None:
    """Return what a job can continue with from memory; None: nothing that it needs is left.

    Hosts that are to leave are left out. If the others cannot continue without them, because none
    has a memory snapshot or they are too few, as many of them as needed stay for one more start.

    A host stays with all of its processes, or not at all: what it has lost is prepared beside the
    job. If no such host has a memory snapshot, one with all of its workers that has it stays, else
    one that has it; then the job waits for what is started again there.

    Args:
        plan: of the start that has ended.
        paused: its processes that are left.
    """
    while True:
        others = {name: at for name, at in paused.items() if name.client not in leaving}
        found = _survivors(plan, others, min_workers)
        if found is not None or not leaving:
            return found
        with_all = _survivors(plan, paused, min_workers)
        if with_all is None:
            return None
        leaving = leaving - {next(host.id for host in with_all.hosts if host.id in leaving)}


def _survivors(
    plan: JobPlan, paused: Mapping[ProcessName, Paused], min_workers: int
) -> Survivors | None:
    live = [worker for worker in plan.workers if worker.process in paused]
    count = Counter(worker.host.id for worker in live)
    of_hosts: dict[Host, list[Paused]] = {}
    for worker in plan.workers:
        of_hosts.setdefault(worker.host, []).append(paused.get(worker.process, Paused()))
    held = {host: _snapshot(found) for host, found in of_hosts.items()}
    snapshots = {host: snapshot for host, snapshot in held.items() if snapshot is not None}
    whole = [host for host in plan.hosts if host.works and count[host.id] == plan.workers_on(host)]
    broken = {shard.host for shard in plan.shards if shard.process not in paused}
    unbroken = [host for host in whole if host not in broken]
    if any(host in snapshots for host in unbroken):
        whole = unbroken
    holders = [host for host in whole if host in snapshots] or list(snapshots)
    if not holders:
        return None
    newest = max(snapshots[host] for host in holders)
    first = next(host for host in holders if snapshots[host] == newest)
    serving = {shard.host.id for shard in plan.shards if shard.process in paused}
    working = {host.id for host in whole}
    left = [host for host in plan.hosts if host.id in (working if host.works else serving)]
    hosts = (first, *(host for host in left if host != first))
    if sum(map(plan.workers_on, hosts)) < min_workers:
        return None
    kept = {host.id for host in hosts}
    lost = tuple(host for host in plan.hosts if host.id not in kept)
    return Survivors(hosts=hosts, iteration=newest, lost=lost)


def _snapshot(workers: Sequence[Paused]) -> int | None:
    """Return the iteration of the snapshot that the workers of a host can start others from: the
    first one's, or of the parts of all. Where one counts a newer part than the others, all of them
    have it (`poseidon/engine/memory.py`).
    """
    if not workers[0].is_part:
        return workers[0].snapshot
    found = [one.snapshot for one in workers if one.snapshot is not None]
    return max(found) if len(found) == len(workers) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waits:
    """A process that waits, and what it has paused with."""

    process: RemoteProcess
    paused: Paused


class PausedProcesses:
    """The processes that wait for the next start of their job."""

    def __init__(self) -> None:
        self._started: dict[ProcessName, tuple[_Place, RemoteProcess]] = {}
        self._waiting: dict[_Place, _Waits] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, spec: ProcessSpec, listener: Listener) -> RemoteProcess | None:
        """Let the process that waits in the place of a specification continue with its document;
        return it, or None if there is none.

        Raises:
            JobError: it has ended since it paused. The start counts on what it has in memory.
        """
        waits = self._waiting.pop(_place(spec), None)
        if waits is None:
            return None
        process = waits.process
        if process.poll() is not None:
            raise JobError(f"{spec.name.describe(process.pid)} has ended while it was paused")
        process.attach(spec.name, listener)
        process.send_line(encode_command("go_on", document=json.loads(spec.first_line)))
        self.started(spec, process)
        return process

    def of(self, plan: JobPlan) -> dict[ProcessName, Paused]:
        """Return the processes that wait in the places of a plan, by their names in it."""
        waiting = {role.process: self._waiting.get(_place_of(role)) for role in plan.roles}
        return {
            name: waits.paused
            for name, waits in waiting.items()
            if waits is not None and waits.process.poll() is None
        }

    def started(self, spec: ProcessSpec, process: RemoteProcess) -> None:
        """Note a process of the start that runs."""
        self._started[spec.name] = _place(spec), process

    def add(self, spec: ProcessSpec, process: RemoteProcess) -> None:
        """Add a process that was prepared beside the start that runs, or end it: another one may
        wait in its place now.
        """
        waits = self._waiting.get(_place(spec))
        if waits is not None and waits.process.poll() is None:
            process.kill()
            return
        self._waiting[_place(spec)] = _Waits(process=process, paused=Paused())

    def keep(self, paused: Mapping[ProcessName, Paused]) -> None:
        """Keep processes of the start that has ended; those that it has not reached wait on."""
        for name, at in paused.items():
            place, process = self._started[name]
            self._waiting[place] = _Waits(process=process, paused=at)
        self._started.clear()

    def missing(self, specs: Iterable[ProcessSpec]) -> list[ProcessSpec]:
        """Return the specifications that no process of the start that runs, nor one that waits,
        has the place of.
        """
        waiting = [(place, waits.process) for place, waits in self._waiting.items()]
        live = [*self._started.values(), *waiting]
        places = {place for place, process in live if process.poll() is None}
        return [spec for spec in specs if _place(spec) not in places]

    def end(self) -> None:
        """Kill all that wait."""
        for waits in self._waiting.values():
            waits.process.kill()
        self._waiting.clear()
        self._started.clear()

    def end_others(
        self, specs: Iterable[ProcessSpec], hosts: Iterable[Host]
    ) -> list[RemoteProcess]:
        """Kill those that wait and that the next start has no use for; return the others.

        A shard waits on: a job of one client has none, and needs it once there are two again.

        Args:
            hosts: that it has.
        """
        used, here = {_place(spec) for spec in specs}, {host.id for host in hosts}
        for place in [place for place in self._waiting if place not in used]:
            client, role, _ = place
            if role is not Role.SHARD or client not in here:
                self._waiting.pop(place).process.kill()
        return [waits.process for waits in self._waiting.values()]


def _place(spec: ProcessSpec) -> _Place:
    return spec.name.client, spec.name.role, spec.slot


def _place_of(role: WorkerPlan | ShardPlan) -> _Place:
    number = role.channel if isinstance(role, ShardPlan) else role.seat.local_rank
    return role.host.id, role.process.role, number
