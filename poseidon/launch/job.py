"""A job with workers and shards, from its flags to its end: what `poseidon train` and `poseidon run` have in common."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from poseidon.cluster.agent.launcher import AgentLauncher
from poseidon.cluster.host_checks import ClientNeeds
from poseidon.cluster.jobs.registry import Registration, new_job_id
from poseidon.cluster.local import LocalLauncher
from poseidon.cluster.machinefile import Host, has_remote_hosts
from poseidon.cluster.plan import JobPlan, ShardPlan, WorkerPlan, plan_job
from poseidon.cluster.process import Launcher, ProcessSpec
from poseidon.cluster.supervision.background import (
    StartReport,
    how_to_follow,
    run_in_background,
    this_command,
)
from poseidon.cluster.supervision.loop import JobListener, JobResult, run_job
from poseidon.cluster.supervision.restarts import StartingPoint, ending_words, run_with_restarts
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.engine.document import WorkerDocument
from poseidon.errors import JobError, PoseidonError, UsageError
from poseidon.exchange.cost import ExchangeKind
from poseidon.launch.closing import listed, near, without_flags
from poseidon.launch.encryption import check_encryption, new_keys, told_keys
from poseidon.launch.exchange_flags import check_clients, exchange_options
from poseidon.launch.job_flags import START_TIMEOUT_S, check_folder, patience, restart_settings
from poseidon.launch.listeners import Listeners, RemoteLogs, StatisticsFile, StragglerReports
from poseidon.launch.restarting import Restarting
from poseidon.launch.site import (
    ClosingLauncher,
    Site,
    child_environment,
    output_folder,
    read_clients,
    register_job,
    remove_unused,
)
from poseidon.launch.snapshot_copies import SnapshotCopies
from poseidon.launch.snapshot_list import SnapshotList
from poseidon.launch.ssh_site import Shipment, SshSite, site_of
from poseidon.launch.terminal import Shown, Terminal
from poseidon.proto.shipped import portable
from poseidon.settings import read_settings
from poseidon.snapshot.rotation import COPIES

RESTARTS_OF_MANY_HOSTS = 3


def run_from_flags(flags: argparse.Namespace, make: Callable[[argparse.Namespace], Job]) -> int:
    """Make a job and run it, here or in the background; returns the exit code.

    Raises:
        PoseidonError: a mistake in what the job is made of, or it failed.
    """
    report = StartReport(read_settings().status_fd)
    try:
        job = make(flags)
        if flags.background:
            return job.start_in_background()
        return job.run(report)
    except PoseidonError as error:
        report.failed(str(error), error.exit_code)
        raise


class Job(ABC):
    """One job from its flags: checks everything that can be checked before a process starts.

    Args:
        flags: those of the command.
        title: what the terminal shows.
        stem: what the job's id begins with.
        devices: of the workers of each client, where `num_app_threads` is 1.
    """

    worker_module: str
    """What a worker's process runs."""
    resumes = False
    """Whether a new start goes on by itself from where the job was."""

    def __init__(self, flags: argparse.Namespace, *, title: str, stem: str, devices: tuple[str, ...]) -> None:
        self._flags = flags
        self._title = title
        if flags.threads is not None and flags.threads < 1:
            raise UsageError(f"--threads={flags.threads}: expected 1 or more")
        if not flags.progress_interval >= 0:
            raise UsageError(
                f"--progress_interval={flags.progress_interval:g}: expected 0 (no lines) or more seconds"
            )
        self._exchange = exchange_options(flags)
        self._devices = devices
        self._site: Site | None = getattr(flags, "site", None)
        if self._site is None:
            clients = read_clients(flags.hostfile, flags.num_comm_channels_per_client)
            self._here, self._site = clients, site_of(flags, clients)
        self._plan = self._make_plan(devices)
        self._id = flags.job or new_job_id(stem, datetime.now(), secrets.token_hex(3))
        self._output = Path(flags.output or Path("output") / self._id).absolute()
        check_folder("output", self._output)
        self._patience = patience(flags)
        self._restarts = restart_settings(flags, usual=self._usual_restarts())
        self._token, self._keys = secrets.token_hex(32), new_keys(flags, self._plan)
        self._point, self._attempt = self.origin, 0
        self._meeting_places: dict[int, str] = {}
        self._far: AgentLauncher | None = None
        self._brought: dict[int, dict[Path, str]] = {}

    @abstractmethod
    def document(self, role: WorkerPlan) -> WorkerDocument:
        """What one worker is told."""

    def background_words(self, added: Sequence[str]) -> list[str]:
        """The words of this command without --background, and with others."""
        return [*without_flags(self._flags.words, ["background"], bare=["background"]), *added]

    def start_in_background(self) -> int:
        """Start this command again, detached, and return once the job runs."""
        words = self.background_words([f"--job={self._id}", f"--output={self._output}"])
        log = self._output / "launcher.log"
        new = not self._output.exists()
        try:
            pid = run_in_background(this_command(words), log, timeout_s=START_TIMEOUT_S + 30)
        except JobError:
            if new:
                remove_unused(self._output)
            raise
        print(how_to_follow(self._id, pid, log))
        return 0

    def run(self, report: StartReport) -> int:
        """Start the processes and stay with them to the end."""
        with (
            self._prepared(),
            output_folder(self._output),
            register_job(self._id, self._flags.hostfile, self._plan.hosts, self._output) as registration,
        ):
            return self._supervise(report, registration)

    def _supervise(self, report: StartReport, registration: Registration) -> int:
        shown = Shown(self._flags.show_logs)
        terminal = Terminal(
            self._title,
            sys.stderr,
            on_started=report.started,
            shown=shown,
            interval_s=self._flags.progress_interval,
        )
        snapshots = SnapshotList(self.origin, terminal.say, self._copies(terminal.say))
        listeners = Listeners(  # files before the terminal: what is shown is kept already
            snapshots,
            StragglerReports(terminal.say),
            StatisticsFile(self._id, self._output),
            RemoteLogs(self._output),
            terminal,
        )
        terminal.say(f"job {self._id}: {_in_words(self._plan)}; logs in {near(self._output)}")
        for note in self.notes():
            terminal.say(note)
        try:
            with SignalRequests(self._patience) as requests:
                start = partial(self._start, listeners, registration, requests, terminal.say)
                world = Restarting(start, snapshots, self._do_without, terminal.say, requests)
                ended = run_with_restarts(world, self._restarts)
                snapshots.finish(ended.result.outcome, requests)
                newest = snapshots.newest()
        finally:
            listeners.close()
        for line in listed(self.closing(ended.result, newest, terminal.reached())):
            terminal.say(line)
        terminal.say(ending_words(self._id, ended))
        return ended.result.exit_code

    def notes(self) -> list[str]:
        """What the user should see of the job before it starts, a line each."""
        return []

    def closing(
        self, result: JobResult, newest: StartingPoint, reached: Sequence[str]
    ) -> list[tuple[str, str]]:
        """What the user may want to know or do at the end of a job that did not fail: a word and what it stands for, each.

        Args:
            result: how it ended.
            newest: the last snapshot; without a state where there is none.
            reached: scores, a line each.
        """
        return [("logs", near(self._output)), *self._traffic()]

    def _traffic(self) -> list[tuple[str, str]]:
        """Where to read what the network cost."""
        return [("network", f"poseidon stats {self._id}")] if self._plan.worker_count > 1 else []

    def _copies(self, warn: Callable[[str], None]) -> SnapshotCopies | None:
        """What brings snapshots to this machine; None where they are written here, or by nobody."""
        site = self._site
        if not isinstance(site, SshSite) or not self.resumes:
            return None
        folder = self._output / COPIES
        return SnapshotCopies(folder, lambda: site.host_of(self._plan.workers[0].host).sftp(), warn)

    def _do_without(self) -> str:
        """See `Surroundings`."""
        site = self._site
        if not isinstance(site, SshSite) or not self.shares_data():
            return ""
        missing = site.leave_out_missing()
        if not missing:
            return ""
        try:
            self._plan = self._make_plan(self._devices)
        except UsageError:
            return ""  # nobody is left who serves
        names = ", ".join(f"client {client.id} ({client.address})" for client in missing)
        return f"going on without {names}: {_in_words(self._plan)} from here on"

    def shares_data(self) -> bool:
        """Whether any machine can do what another one did."""
        return False

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Every host is asked first, and nothing is in the way; connections end with the block."""
        site = self._site
        if site is None:
            yield
            return
        try:
            site.prepare({client.id: self.needs(client) for client in site.clients})
            self._plan = self._make_plan(self._devices)  # now with the addresses of the hosts
            yield
        finally:
            site.close()

    def needs(self, client: Host) -> ClientNeeds:
        """What a client's host must have before anything starts."""
        workers = [worker for worker in self._plan.workers if worker.host.id == client.id]
        cards = (worker.device.removeprefix("cuda:") for worker in workers)
        return ClientNeeds(
            id=client.id,
            addresses=(),
            ports=tuple(s.port for s in self._plan.shards if s.host.id == client.id and s.port),
            devices=tuple(int(card) for card in cards if card.isdecimal()),
            folders=(self.there(self._output),),
        )

    def there(self, path: Path) -> str:
        """A path as the processes are told it: by other hosts it may be meant in their own working folder."""
        return str(path) if self._site is None else portable(path)

    def brought(self, path: Path, role: WorkerPlan) -> str:
        """Where a worker finds a file that was brought to its host; `path` itself where none had to be."""
        return self._brought.get(role.host.id, {}).get(path) or self.there(path)

    def shipments(self) -> Sequence[Shipment]:
        """Files that every worker's host needs and may not have."""
        return ()

    def _start(
        self,
        listener: JobListener,
        registration: Registration,
        requests: SignalRequests,
        say: Callable[[str], None],
        attempt: int,
        point: StartingPoint,
    ) -> JobResult:
        """Start all processes once and stay with them to their end."""
        self._point, self._attempt = point, attempt
        # What is left of an earlier start has no part in this one.
        self._token, self._keys = secrets.token_hex(32), new_keys(self._flags, self._plan)
        try:
            with self._launcher(registration) as launcher:
                if requests.stop_wanted():  # while hosts were reached and files brought to them
                    error = JobError("the job was stopped before it had started")
                    error.exit_code = requests.stop_code
                    raise error
                say(f"starting {_processes_in_words(self._plan)}...")
                return run_job(
                    self._plan,
                    self._spec,
                    launcher,
                    listener=listener,
                    settings=self._patience,
                    registration=registration,
                    requests=requests,
                )
        finally:
            for folder in self._meeting_places.values():
                shutil.rmtree(folder, ignore_errors=True)  # there still where workers never met
            self._meeting_places.clear()

    @contextmanager
    def _launcher(self, registration: Registration) -> Iterator[Launcher]:
        """What starts the processes; it ends with the block."""
        if self._site is None:
            yield LocalLauncher()
            return
        launcher = self._moved_in(self._site.launcher(registration.record))
        try:
            yield launcher
        finally:
            self._far = None
            launcher.close()

    def _moved_in(self, launcher: ClosingLauncher) -> ClosingLauncher:
        """The launcher, once the hosts' folders are known and what is needed there was brought; closed where it cannot be."""
        try:
            self._move_in(launcher)
        except BaseException:
            self._far = None
            launcher.close()
            raise
        return launcher

    def _move_in(self, launcher: ClosingLauncher) -> None:
        """Learn the hosts' folders, and bring there what is needed."""
        if not isinstance(launcher, AgentLauncher):
            return
        self._far = launcher
        shipments = self.shipments()
        if isinstance(self._site, SshSite) and shipments:
            clients = {worker.host.id: worker.host for worker in self._plan.workers}
            self._brought = self._site.bring(shipments, launcher, clients.values())

    @property
    def origin(self) -> StartingPoint:
        """Where the job begins."""
        return StartingPoint()

    def _usual_restarts(self) -> int:
        far = has_remote_hosts(self._plan.hosts)
        return RESTARTS_OF_MANY_HOSTS if far and self.resumes else 0

    def worker_document(self, role: WorkerPlan) -> WorkerDocument:
        """What one worker of any job is told."""
        flags, plan = self._flags, self._plan
        return WorkerDocument(
            job=self._id,
            token=self._token,
            keys=told_keys(self._keys, role),
            output=self.there(self._output),
            rank=role.rank,
            workers=plan.worker_count,
            client=role.position,
            clients=plan.working_hosts,
            local_rank=role.local_rank,
            local_workers=plan.workers_per_host,
            local_address=self._meeting_place(role),
            device=role.device,
            threads=self._threads(role),
            shards=plan.shard_count,
            exchange=self._exchange,
            host=role.host.socket_address,
            homes=plan.homes,
            loads=plan.loads,
            trace=flags.trace,
        )

    def _make_plan(self, devices: tuple[str, ...]) -> JobPlan:
        flags = self._flags
        if flags.num_app_threads < 1:
            raise UsageError(f"--num_app_threads is {flags.num_app_threads}, expected 1 or more")
        if devices == ("cpu",):
            devices *= flags.num_app_threads
        channels = flags.num_comm_channels_per_client
        clients = self._here if self._site is None else self._site.clients
        plan = plan_job(clients, devices_per_host=devices, channels=channels)
        check_clients(self._exchange, plan.working_hosts)
        check_encryption(flags, self._exchange.kind, clients)
        # A client that is alone needs no server, unless it is asked for: it applies the update rule itself.
        asked = flags.exchange not in (None, "local") or plan.has_dedicated_servers
        served = plan.working_hosts > 1 or (asked and self._exchange.kind is not ExchangeKind.LOCAL)
        return plan if served else replace(plan, shards=())

    def _spec(self, role: WorkerPlan | ShardPlan) -> ProcessSpec:
        marks: tuple[str, ...]
        if isinstance(role, ShardPlan):
            module, marks, threads = "ps_server", ("--stdin", "--shard", str(role.index)), 1
            first_line = self._shard_line(role)
        else:
            module, marks, threads = self.worker_module, ("--rank", str(role.rank)), self._threads(role)
            first_line = self.document(role).to_json()
        return ProcessSpec(
            name=role.process,
            argv=(sys.executable, "-m", module, "--job", self._id, *marks),
            environment=child_environment(threads),
            first_line=first_line,
        )

    def _shard_line(self, role: ShardPlan) -> bytes:
        line: dict[str, object] = {
            "token": self._token,
            "keys": told_keys(self._keys, role),
            "workers": self._plan.working_hosts,  # of several workers on a machine one speaks for all
            "address": role.address,
        }
        if self._flags.trace:
            line["trace"] = self.there(self._output / f"trace_shard_{role.index}.json")
        return json.dumps(line).encode()

    def _threads(self, role: WorkerPlan) -> int:
        """CPU threads of a worker: as asked for, or its machine's, shared out."""
        if self._flags.threads is not None:
            return int(self._flags.threads)
        if self._far is not None:
            return max(1, self._far.cores(role.host) // self._plan.workers_per_host)
        return max(1, (os.cpu_count() or 1) // self._plan.worker_count)

    def _meeting_place(self, role: WorkerPlan) -> str:
        """Where the workers of a machine meet: a path in a folder that only this user can enter."""
        if self._plan.workers_per_host == 1:
            return ""
        if self._far is not None:
            return str(Path(self._far.scratch(role.host)) / f"client_{role.position}" / "workers")
        if role.position not in self._meeting_places:
            self._meeting_places[role.position] = tempfile.mkdtemp(prefix="poseidon-")
        return str(Path(self._meeting_places[role.position]) / "workers")


def _in_words(plan: JobPlan) -> str:
    return ", ".join(
        (
            counted(len(plan.hosts), "client"),
            counted(plan.worker_count, "worker"),
            counted(plan.shard_count, "shard"),
        )
    )


def _processes_in_words(plan: JobPlan) -> str:
    workers = counted(plan.worker_count, "worker")
    return f"{workers} and {counted(plan.shard_count, 'shard')}" if plan.shard_count else workers


def counted(number: int, word: str) -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{number} {word}{'' if number == 1 else 's'}"
