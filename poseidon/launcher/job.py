"""A job with workers and shards: its plan, what its hosts need, and what each process gets.

Law: a `Job` checks everything that can be checked before a process starts, and starts none
(`poseidon.launcher.runner`).
"""

from __future__ import annotations

import secrets
import shlex
import statistics
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from poseidon.base.durable import obstacle_to
from poseidon.base.paths import own_command, short_path
from poseidon.cluster.host_probe import HostNeeds
from poseidon.cluster.job_plan import JobPlan, ShardPlan, WorkerPlan, plan_job
from poseidon.cluster.jobs.registry import new_job_id
from poseidon.cluster.machinefile import Host, has_remote_hosts
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.state import JobResult
from poseidon.engine.document import TrainingDocument, WorkKind
from poseidon.engine.snapshot_runs import COPIES
from poseidon.errors import JobError, UsageError, counted
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.compute_options import ComputeOptions
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, check_virtual_workers
from poseidon.launcher.closing_lines import resume_command, without_flags
from poseidon.launcher.job_folder import OUTPUT
from poseidon.launcher.processes import (
    Start,
    child_environment,
    imports_of,
    shard_spec,
    worker_spec,
)
from poseidon.launcher.request import JobRequest
from poseidon.launcher.site import FileSet, Site
from ps_server.json_fields import fields_of
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers

RESTARTS_OF_MANY_HOSTS = 3
CONNECT_S = 45.0
"""How long a worker tries to connect to a shard or another worker, all of which listen. A host that
is lost is noticed before.
"""
FRAGMENTS_TRAVEL = (
    "parts of the tensors are always on their way (fragments or delay of --local_steps)"
)
"""See `Job.bound_because`."""


class Job(ABC):
    """One job.

    Args:
        title: what the terminal shows.
        devices: of the workers of each host; `cpu` alone stands for `workers` of them.
    """

    kind: ClassVar[WorkKind]
    """What its workers do."""
    own_stdout = False
    """Whether a worker's standard output is its own; see `ProcessSpec`."""
    restarts_by_itself: bool
    """Whether the job restarts on several hosts without --max_restarts."""
    origin = StartingPoint()
    """Where the job begins."""
    takes_snapshots = True
    """Whether an elastic job takes snapshots in memory, whatever its script does."""

    def __init__(
        self, request: JobRequest, site: Site, *, title: str, stem: str, devices: tuple[str, ...]
    ) -> None:
        self.request = request
        self.site = site
        self.title = title
        self._fixed_because: str | None = None
        self._threads_of: dict[int, int] = {}
        self._speeds: Mapping[tuple[int, int], float] = {}
        """The speeds of workers, by the id of their host and their rank there; a worker without one
        is as fast as the others on average."""
        self._devices = devices * request.workers if devices == ("cpu",) else devices
        self.plan, self.virtual_workers = self._make_plan(site.hosts)
        request.exchange.check_quorum(self.virtual_workers)
        self._check_hosts()
        if request.balance.measured and not self.elastic:
            raise UsageError(
                "--balance=auto moves virtual workers at snapshots in memory, but this job takes "
                f"none: {self.fixed_because}; start an elastic job, or give the speed of each "
                "client, as in --balance=1,0.5"
            )
        self.id = request.job or new_job_id(stem, datetime.now(), secrets.token_hex(3))
        self.output = (request.output or OUTPUT / self.id).absolute()
        check_folder("output", self.output)
        plan_file = request.exchange_plan
        self._given_plan = "" if plan_file is None else RecordedPlan.read(plan_file).to_json()

    @property
    def exchange_plan(self) -> str:
        """The plan of an earlier run that the job takes over, as `RecordedPlan.to_json`; empty: it
        makes its own.
        """
        return self._given_plan

    @property
    def max_restarts(self) -> int:
        """The most restarts; without --max_restarts none, or some of a job on several hosts."""
        if self.request.max_restarts is not None:
            return self.request.max_restarts
        many = self.restarts_by_itself and has_remote_hosts(self.plan.hosts)
        return RESTARTS_OF_MANY_HOSTS if many else 0

    @property
    def bound_because(self) -> str:
        """Why no host of the job can compute for the virtual workers of another one; empty: each
        can.
        """
        return "each host has its own work"

    @property
    def fixed_because(self) -> str:
        """Why the job's hosts stay as they are while it runs; empty: it is elastic.

        What the job is when it is first asked, it stays.
        """
        if self._fixed_because is None:
            request, exchange = self.request, self.request.exchange
            reasons = {
                "it has one host with workers and no --elastic=every=N": (
                    self.plan.working_hosts == 1 and request.memory_snapshot_every is None
                ),
                self.bound_because: bool(self.bound_because),
                "--max_restarts is 0": self.max_restarts == 0,
                "--elastic is 0": request.elastic == 0,
                "--elastic=every is 0": request.memory_snapshot_every == 0,
                "--staleness is not 0": exchange.staleness > 0,
                "--local_steps has fragments": exchange.sync_fragments > 1,
                "--local_steps has a delay": exchange.sync_delay > 0,
            }
            self._fixed_because = next((why for why, holds in reasons.items() if holds), "")
        return self._fixed_because

    @property
    def elastic(self) -> bool:
        """Whether processes continue after the loss of others, from a snapshot in memory."""
        return not self.fixed_because

    @property
    def usual_workers(self) -> int:
        """The number of workers of a host that says nothing else."""
        return len(self._devices)

    def background_argv(self, added: Sequence[str]) -> list[str]:
        """Return the arguments of this command without --background, with more flags."""
        return [*without_flags(self.request.argv, ["background"]), *added]

    def renew_plan(self) -> None:
        """Plan the job for the hosts that the site has now, with their addresses.

        Raises:
            UsageError: they cannot run it.
        """
        self.plan, self.virtual_workers = self._make_plan(self.site.hosts)

    def with_hosts(self, hosts: Sequence[Host]) -> Job:
        """Return this job as it would be with other hosts.

        Raises:
            UsageError: they cannot run it.
        """
        other = copy(self)
        other.plan, other.virtual_workers = self._make_plan(hosts)
        return other

    def _check_hosts(self) -> None:
        """Refuse what the job has too few hosts for."""
        request, plan = self.request, self.plan
        if (request.elastic or 0) >= plan.working_hosts:
            raise UsageError(
                f"--elastic={request.elastic}: each copy of a memory snapshot needs a further "
                f"host, and this job has {counted(plan.working_hosts, 'host')} with workers; "
                f"expected {plan.working_hosts - 1} or less"
            )
        if request.min_workers > plan.worker_count:
            raise UsageError(
                f"--elastic=min_workers={request.min_workers}: this job has "
                f"{counted(plan.worker_count, 'worker')}; expected {plan.worker_count} or less"
            )
        for worker in plan.workers:
            if worker.host.gpus not in (None, "cpu"):
                self._check_gpu(worker)

    def _check_gpu(self, worker: WorkerPlan) -> None:
        """Refuse a GPU of the machinefile that this machine lacks; other hosts are asked later."""
        available = self.site.visible_gpus()
        if available is not None and int(worker.device.removeprefix("cuda:")) >= available:
            host = worker.host
            raise UsageError(
                f"gpus={host.gpus} of client {host.id} on {host.name}: this machine has "
                f"{counted(available, 'GPU')}, numbered from 0; correct the machinefile, or write "
                "gpus=cpu there"
            )

    def _make_plan(self, hosts: Sequence[Host]) -> tuple[JobPlan, VirtualWorkers]:
        """Return the plan of the processes, and of the virtual workers that they compute for."""
        request = self.request
        options = request.exchange
        plan = plan_job(
            hosts,
            devices_per_host=self._devices,
            channels=request.shards,
            with_server=options.kind.has_shards,
        )
        if options.kind is ExchangeKind.LOCAL and plan.working_hosts > 1:
            raise UsageError(
                f"--exchange=local needs one client; this job has {plan.working_hosts}"
            )
        options.check_workers_per_host(max(plan.workers_by_host))
        virtual = self._place_virtual_workers(plan)
        # One client alone needs no server, unless it is asked for: it applies the update rule
        # itself. With several virtual workers only shards encode and round as several clients do.
        served = plan.working_hosts > 1 or request.server_requested or plan.has_dedicated_servers
        by_number = request.virtual_workers is not None or not virtual.is_one_each
        served |= by_number and virtual.count > 1 and options.is_encoded
        return (plan if served else replace(plan, shards=())), virtual

    def _place_virtual_workers(self, plan: JobPlan) -> VirtualWorkers:
        """Divide the virtual workers among the workers, by the speeds of their clients."""
        count = self.request.virtual_workers
        if count is None:
            count = self.usual_virtual_workers(plan)
        self.check_virtual_workers(count, plan)
        if not self._speeds:
            clients = list(dict.fromkeys(worker.host.id for worker in plan.workers))
            given = self.request.balance.of_clients(clients)
            self._speeds = {_seat(w): given[w.host.id] for w in plan.workers if given}
        usual = statistics.mean(self._speeds.values() or [1.0])
        speeds = [self._speeds.get(_seat(worker), usual) for worker in plan.workers]
        return VirtualWorkers.spread(count, speeds)

    def take_speeds(self, speeds: Sequence[float]) -> None:
        """Divide the virtual workers by measured speeds from the next plan on.

        Args:
            speeds: of the workers of the present plan, by rank.
        """
        measured = zip(map(_seat, self.plan.workers), speeds, strict=True)
        self._speeds = {**self._speeds, **dict(measured)}

    def usual_virtual_workers(self, plan: JobPlan) -> int:
        """Return the number of virtual workers without --virtual_workers."""
        return plan.worker_count

    def check_virtual_workers(self, count: int, plan: JobPlan) -> None:
        """Refuse a number of virtual workers that the workers of a plan cannot have.

        Raises:
            UsageError: what excludes it, and what to do.
        """
        workers = plan.worker_count
        if count < workers:
            raise UsageError(
                f"--virtual_workers={count} is less than the {workers} workers of the job; give "
                f"{workers} or more, or start fewer workers"
            )
        by_number = self.request.virtual_workers is not None or count != workers
        check_virtual_workers(
            VirtualWorkers.spread(count, [1.0] * workers) if by_number else None,
            self.request.exchange,
        )

    def needs(self, host: Host) -> HostNeeds:
        """Return what the processes of a host need before anything starts."""
        workers = [worker for worker in self.plan.workers if worker.host.id == host.id]
        cards = (worker.device.removeprefix("cuda:") for worker in workers)
        return HostNeeds(
            id=host.id,
            addresses=(),
            ports=tuple(s.port for s in self.plan.shards if s.host.id == host.id and s.port),
            devices=tuple(int(card) for card in cards if card.isdecimal()),
            folders=(self.site.path(self.output),),
            peers=self.plan.worker_count + self.plan.shard_count,
        )

    def files(self, point: StartingPoint) -> Sequence[FileSet]:
        """Return the launcher's files that every worker needs.

        Args:
            point: where the start resumes from; in memory, those of a host that joins.
        """
        return ()

    def shares_data(self) -> bool:
        """Return whether every host can do what any other host did."""
        return False

    def description(self) -> str:
        """Return `2 clients, 4 workers, 2 shards`, with the virtual workers if they are more."""
        plan = self.plan
        counts = [
            (len(plan.hosts), "client"),
            (plan.worker_count, "worker"),
            (plan.shard_count, "shard"),
        ]
        if not self.virtual_workers.is_one_each:
            counts.insert(2, (self.virtual_workers.count, "virtual worker"))
        return ", ".join(counted(number, noun) for number, noun in counts)

    def notes(self) -> list[str]:
        """Return the lines that the user should see before the job starts."""
        return placement_notes(
            self.virtual_workers,
            measured=self.request.balance.measured,
            local_steps=self.request.exchange.local_steps > 0,
        )

    def final_report(
        self, result: JobResult, newest: StartingPoint, scores: Sequence[str]
    ) -> list[tuple[str, str]]:
        """Return what the user may want to know or do after a job that did not fail: names with
        their texts.

        Args:
            newest: the last snapshot; without a state if there is none.
            scores: of the last test, a line each.
        """
        return [("logs", short_path(self.output)), *self._network_report()]

    def resume_line(self, state: Path, **changes: str) -> str:
        """Return the command that resumes this job from a snapshot.

        Args:
            state: a snapshot on this machine.
            changes: more flags with other values than this job's.
        """
        changes = {"snapshot": self._name_of(state), **changes}
        return self.site.resume_command(self._resume_command(changes), changes)

    def _resume_command(self, changes: Mapping[str, str]) -> str:
        return resume_command(self.request.argv, changes)

    @property
    def name(self) -> str:
        """How the user names this job in commands: by its id, or by its folder if that is not
        below output/.
        """
        found_by_id = self.output == (OUTPUT / self.id).absolute()
        return self.id if found_by_id else short_path(self.output)

    def _name_of(self, state: Path) -> str:
        """Return what --snapshot takes for the newest snapshot: the job, if that is where it is."""
        return (
            self.name
            if state.absolute().parent in (self.output, self.output / COPIES)
            else short_path(state)
        )

    def _network_report(self) -> list[tuple[str, str]]:
        if self.plan.worker_count == 1:
            return []
        return [("network", f"{own_command()} stats {shlex.quote(self.name)}")]

    @abstractmethod
    def document(self, role: WorkerPlan, start: Start) -> TrainingDocument:
        """Return the document of one worker for one start."""

    def spec(self, role: WorkerPlan | ShardPlan, start: Start) -> ProcessSpec:
        """Return how to start one process."""
        if isinstance(role, ShardPlan):
            trace = (
                self.site.path(self.output / f"trace_shard_{role.index}.json")
                if self.request.trace
                else ""
            )
            spec = shard_spec(
                role,
                start,
                self.id,
                self.kind,
                workers=self.plan.worker_count,
                threads=self._threads_on(role.host),
                trace=trace,
            )
        else:
            spec = worker_spec(
                role,
                self.document(role, start),
                own_stdout=self.own_stdout,
                own_stdin=len(self.plan.workers) == 1,
            )
        # on a machine that shuts down they compute until their host leaves the job
        return replace(spec, ignore_signals=self.elastic and not self.site.opens_files_here)

    def import_ahead(self) -> Sequence[threading.Event]:
        """Let all hosts import what the processes of a start need; see `Site.import_ahead`."""
        environments = {host: child_environment(self._threads_on(host)) for host in self.plan.hosts}
        return self.site.import_ahead(environments, imports_of(self.kind))

    def worker_document(self, role: WorkerPlan, start: Start) -> TrainingDocument:
        """Return the part of a worker's document that every job has."""
        plan = self.plan
        alone = role.seat.local_workers == 1
        by_host = plan.workers_by_host
        return TrainingDocument(
            **fields_of(self.request, ComputeOptions),
            job=self.id,
            output=self.site.path(self.output),
            member=Membership(
                network=Network(
                    rank=role.rank,
                    size=plan.worker_count,
                    host=role.host.socket_address,
                    token=start.token,
                    keys=start.keyring(role),
                    connect_s=CONNECT_S,
                ),
                hosts=by_host if max(by_host) > 1 else (),
                local_address=""
                if alone
                else str(Path(self.site.socket_folder(role.host)) / "workers"),
                shards=plan.shard_count,
                homes=plan.homes,
                loads=plan.loads,
                virtual_workers=self.virtual_workers if self.plans_by_number else None,
                one_machine=not has_remote_hosts(plan.hosts),
                options=self.request.exchange,
            ),
            device=role.device,
            threads=self._threads(role),
            trace=self.request.trace,
            exchange_plan=start.exchange_plan,
            copies=(self.request.elastic or 1) if self.elastic else 0,
            memory_snapshot_every=self.request.memory_snapshot_every or 0,
            rewind=start.point.iteration if start.point.memory else -1,
            aside=start.aside,
            balances=self.request.balance.measured,
            sources=self.site.sources(role.host),
        )

    @property
    def plans_by_number(self) -> bool:
        """Whether everything follows from the number of virtual workers: also the plan of the
        exchange, which otherwise follows from the cluster.
        """
        return self.request.virtual_workers is not None or not self.virtual_workers.is_one_each

    def _threads(self, role: WorkerPlan) -> int:
        """Return the CPU threads of a worker: the same in each start of the job, because bits may
        depend on them.
        """
        host = role.host.id
        if host not in self._threads_of:
            self._threads_of[host] = self.request.threads or self.usual_threads(role)
        return self._threads_of[host]

    def _threads_on(self, host: Host) -> int:
        """Return the CPU threads of each worker of a host; 1 if it has none."""
        workers = (worker for worker in self.plan.workers if worker.host.id == host.id)
        return max(map(self._threads, workers), default=1)

    def usual_threads(self, role: WorkerPlan) -> int:
        """Return the CPU threads of a worker without --threads: one where the bits are to be the
        same on other hosts, else an equal part of its host's.
        """
        if self.request.virtual_workers is not None:
            return 1
        return max(1, self.site.cores(role.host) // self.plan.workers_on(role.host))


def _seat(worker: WorkerPlan) -> tuple[int, int]:
    return worker.host.id, worker.seat.local_rank


def other_iteration(newest: StartingPoint, result: JobResult) -> str:
    """Return `iteration 20`, the one of a job's newest snapshot; empty: the job's last one."""
    return "" if newest.iteration == result.iteration else f"iteration {newest.iteration}"


def placement_notes(virtual: VirtualWorkers, *, measured: bool, local_steps: bool) -> list[str]:
    """Return a line on what each worker computes, unless it is for one virtual worker.

    Args:
        measured: whether they will move by the measured speeds of the workers.
        local_steps: whether each trains with values of its own.
    """
    if virtual.is_one_each:
        return []
    workers = range(virtual.processes)
    numbers = [len(virtual.of(worker)) for worker in workers]
    copies = "values and histories for each" if local_steps else "one copy of the net"
    turns = f"a worker computes for one after another, with {copies}"
    if len(set(numbers)) == 1:
        where = f"{counted(numbers[0], 'virtual worker')} on each worker"
    else:
        where = f"the workers compute for {', '.join(map(str, numbers))} virtual workers"
    sums = max(len(virtual.nodes(worker)) for worker in workers)
    sent = f"; it sends at most {counted(sums, 'sum')} of a tensor's gradients"
    moves = "; they move by the measured speed of the workers" if measured else ""
    return [f"{where}; {turns}{(sent + moves) if virtual.processes > 1 else ''}"]


def check_folder(flag: str, folder: Path) -> None:
    """Raise JobError for a folder that cannot be written to."""
    obstacle = obstacle_to(folder)
    if obstacle:
        raise JobError(f"--{flag}: cannot write to {folder}: {obstacle}")
