"""The hosts of a job, and the changes that its next start makes: hosts that come back, join or
leave.

Law: a change waits for the next start, which all workers reach at one memory snapshot. One host is
prepared at a time, on a thread of its own; what fails there disturbs nobody.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from poseidon.base.settings import read_settings
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.jobs.registry import Registration, Registry
from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.errors import JobError, PoseidonError, UsageError, counted
from poseidon.launcher.job import Job
from poseidon.launcher.newcomers import NewcomerListener, PreparedProcess, Returns
from poseidon.launcher.processes import Start

_POLL_S = 0.1


@dataclass(slots=True)
class _Known:
    """A host that the job has or has lost, or that has left it for good."""

    host: Host
    returns: Returns = field(default_factory=Returns)
    has_left: bool = False


class HostChanges(JobListener):
    """The changes of one job's hosts; it hears when a start runs."""

    def __init__(
        self,
        job: Job,
        registration: Registration,
        requests: SignalRequests,
        report: Callable[[str], None],
    ) -> None:
        self._job = job
        self._registration = registration
        self._requests = requests
        self._report = report
        self._hosts = {host.id: _Known(host) for host in job.site.hosts}
        self._running = False
        self._takes_snapshots = job.takes_snapshots
        self._closed = threading.Event()
        self._arrived: queue.SimpleQueue[tuple[Host, Sequence[PreparedProcess]]] = (
            queue.SimpleQueue()
        )
        self.leaving: frozenset[int] = frozenset()
        """The ids of the hosts that the next start does without."""
        self.new: frozenset[int] = frozenset()
        """The ids of the hosts that the last start has taken in."""
        self._lock = threading.Lock()
        self._commands = RequestFiles(Registry(read_settings().state_folder).folder, job.id)

    def start(self) -> None:
        """Begin to take hosts in, and requests."""
        self._job.site.let_leave = self._asked_to_end
        threading.Thread(target=self._run, name="poseidon hosts", daemon=True).start()

    def on_started(self) -> None:
        self._running = True
        self._check_leaving()
        if self.leaving or not self._arrived.empty():  # since the last start has ended
            self._requests.regroup()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """Note that a script has taken a snapshot in memory."""
        if event["event"] == "progress" and event.get("in_memory") is not None:
            self._takes_snapshots = True

    def on_ended(self) -> None:
        """Note that the start which ran has ended."""
        self._running = False

    def close(self) -> None:
        """Take nothing in any more; what is being prepared is left to whoever ends the agents."""
        self._closed.set()
        self._commands.close()

    def go_on(self, without: frozenset[int]) -> None:
        """Note that the job continues from memory, without these hosts."""
        with self._lock:
            self.leaving -= without
        for number in without:
            if number in self._hosts:
                self._hosts[number].has_left = True
            self._registration.left(number)
        self._job.site.release(without)

    def arrivals(self, present: Sequence[Host]) -> list[Host]:
        """Take what was prepared since the last start; return the hosts that are new with it."""
        pool = self._job.site.paused
        new: list[Host] = []
        self._requests.forget_regroup()
        while not self._arrived.empty():
            host, prepared = self._arrived.get()
            for one in prepared:
                pool.add(one.spec, one.process)
            works = any(one.works for one in prepared if one.spec.name.client == host.id)
            if works and all(host.id != each.id for each in (*present, *new)):
                new.append(host)
        self.new = frozenset(host.id for host in new)
        return new

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            try:
                if self._unchanged:
                    self._take_request()
                if self._unchanged:
                    self.try_next(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the job continues without
                self._report(f"warning: hosts can no longer join or come back: {error!r}")
                return

    @property
    def _unchanged(self) -> bool:
        """Whether a start runs, and no change waits for the next one."""
        return self._running and self._arrived.empty() and not self.leaving

    def _take_request(self) -> None:
        request = self._commands.take()
        if request is None:
            return
        try:
            answer = self._carry_out(request)
        except PoseidonError as error:
            self._commands.answer(str(error), done=False)
        else:
            self._commands.answer(answer, done=True)

    def _carry_out(self, request: HostRequest) -> str:
        """Begin what a command requests; return the answer."""
        if request.do not in ("join", "leave"):
            raise UsageError(f"the launcher does not know the request '{request.do:.20}'")
        if not self._job.elastic:
            raise JobError(f"the hosts of this job cannot change: {self._job.fixed_because}")
        if request.do == "join":
            return f"{named([self._join(request.host)])} takes part from now on"
        hosts = self._job.site.hosts
        leaving = [
            each for each in hosts if request.host in (each.address, each.name, str(each.id))
        ][:1]
        if not leaving:
            known = ", ".join(f"{each.id} ({each.name})" for each in hosts)
            raise JobError(f"the job has no host {request.host:.80}; its clients are {known}")
        self._leave(leaving)
        return f"{named(leaving)} leaves the job after the next iteration"

    def _leave(self, hosts: Sequence[Host]) -> None:
        """Let hosts leave the job, or raise why it cannot continue without them."""
        self._check_snapshots()
        with self._lock:
            leaving = self.leaving | {host.id for host in hosts}
            self._check_goes_on(leaving, named(hosts))
            self.leaving = leaving
        self._requests.regroup()

    def _check_goes_on(self, leaving: frozenset[int], names: str) -> None:
        """Raise why the job cannot continue without hosts; `names` are those that are to leave."""
        job = self._job
        left = [host for host in job.site.hosts if host.id not in leaving]
        workers = sum(map(job.plan.workers_on, left))
        if not workers:
            raise JobError(f"{names} is the last host of the job; poseidon kill ends the job")
        if workers < job.request.min_workers:
            raise JobError(f"without {names} the job has fewer workers than --elastic=min_workers")
        job.with_hosts(left)  # raises what keeps it from continuing

    def _check_leaving(self) -> None:
        """Let the hosts stay that are still to leave, if others that were lost meanwhile keep the
        job from continuing without them.
        """
        with self._lock:
            leaving = [host for host in self._job.site.hosts if host.id in self.leaving]
            try:
                self._check_goes_on(self.leaving, named(leaving))
            except PoseidonError as error:
                self.leaving = frozenset()
                self._report(f"{named(leaving)} cannot leave, and stays: {error}")

    def _check_snapshots(self) -> None:
        """Refuse changes of a job that cannot regroup."""
        if not self._takes_snapshots:
            raise JobError(
                "the hosts of this job cannot change: its script has taken no snapshot in memory "
                "yet; it must call group.resume() and read from group.loader()"
            )

    def _asked_to_end(self, hosts: Sequence[Host]) -> bool:
        """See `Site.let_leave`: a signal asks the hosts to end."""
        try:
            if not self._job.elastic:
                return False
            self._leave(hosts)
        except PoseidonError as error:
            self._report(f"{named(hosts)} was asked to end, but cannot leave: {error}")
            return False
        self._report(f"{named(hosts)} was asked to end and leaves the job after the next iteration")
        return True

    def _join(self, address: str) -> Host:
        """Let another host take part; return it, or raise why it cannot. The job continues as before."""
        job, site = self._job, self._job.site
        self._check_snapshots()
        workers = job.plan.worker_count + job.usual_workers
        if not site.takes_others:
            raise JobError(
                "a scheduler or Ray chooses the hosts of this job, so no other host can join"
            )
        present = [known.host.address for known in self._remaining()]
        if not site.opens_files_here and address in present:
            raise JobError(f"{address:.80} is already a host of the job")
        if site.opens_files_here != is_loopback(address):
            expected = "127.0.0.1" if site.opens_files_here else "an address that they reach"
            raise JobError(f"{address:.80} cannot reach the job's hosts; expected {expected}")
        if job.virtual_workers.count < workers:
            raise JobError(
                f"the job has {counted(job.virtual_workers.count, 'virtual worker')}, too few for "
                f"{workers} workers; start a job that hosts may join with --virtual_workers"
            )
        host = Host(id=max(self._hosts, default=-1) + 1, address=address, port=0)
        self._registration.joins(host)
        try:
            host = self._reach(host)
            if not site.opens_files_here and site.has_processes(host):
                raise JobError("it is already a host of the job, under a different name")
            self._take_in(host, self._prepare(host))
        except PoseidonError as error:
            self._registration.left(host.id)
            site.release([host.id])
            raise JobError(f"{address:.80} cannot take part: {error}") from error
        return host

    def _reach(self, host: Host) -> Host:
        job = self._job_with(host)
        files = job.files(StartingPoint(memory=True))
        return job.site.reach(host, self._registration.record, job.needs, files)

    def _job_with(self, host: Host) -> Job:
        """Return the job as it is with a host that it has not."""
        others = (each for each in self._job.site.hosts if each.id != host.id)
        return self._job.with_hosts([*others, host])

    def try_next(self, now_s: float) -> None:
        """Prepare the first host that is missing and due, if there is any.

        Args:
            now_s: monotonic.
        """
        for known in self._missing():
            if known.returns.taken_in >= self._job.request.max_rejoins:
                self._leave_out(known)
            elif known.returns.due_s <= now_s:
                self._try(known, now_s)
                return

    def _remaining(self) -> list[_Known]:
        return [known for known in list(self._hosts.values()) if not known.has_left]

    def _missing(self) -> Sequence[_Known]:
        """Return the hosts that the job should have and that the start that runs has not."""
        job = self._job
        if not (job.elastic and job.site.takes_back):
            return ()
        present = {host.id for host in job.site.hosts}
        missing = [known for known in self._remaining() if known.host.id not in present]
        return [known for known in missing if not job.site.is_killed(known.host)]

    def _try(self, known: _Known, now_s: float) -> None:
        try:
            known.host = host = self._reach(known.host)  # with its address now
            prepared = self._prepare(host)
        except PoseidonError as error:
            if not known.returns.failures and not self._closed.is_set():
                self._report(f"{named([known.host])} is not back: {error}")
            known.returns.fail(now_s)
            return
        known.returns.succeed()
        self._take_in(host, prepared)

    def _leave_out(self, known: _Known) -> None:
        most = self._job.request.max_rejoins
        if not known.returns.reported:
            known.returns.reported = True
            self._report(
                f"{named([known.host])} was lost more often than --elastic=max_rejoins={most} "
                "allows; the job continues without it"
            )

    def _prepare(self, host: Host) -> list[PreparedProcess]:
        """Start all that the job needs to go on with a host; return when it waits, or leave nothing."""
        site, listener, job = self._job.site, NewcomerListener(), self._job_with(host)
        point = StartingPoint(memory=True)
        start = replace(Start.new(0, point, job.plan, job.request.encrypt), aside=True)
        roles = {role.process: role for role in job.plan.roles}
        specs = site.paused.missing([job.spec(role, start) for role in roles.values()])
        prepared: list[PreparedProcess] = []
        try:
            for spec in specs:
                process = site.start_aside(spec, roles[spec.name].host, listener)
                prepared.append(PreparedProcess(spec=spec, process=process))
            listener.until_all_wait(prepared, self._closed.is_set)
        except JobError:
            for one in prepared:
                one.process.kill()
            raise
        return prepared

    def _take_in(self, host: Host, prepared: Sequence[PreparedProcess]) -> None:
        """Let the job regroup with a host: all of these processes wait."""
        self._hosts.setdefault(host.id, _Known(host))
        self._arrived.put((host, prepared))
        self._requests.regroup()


def named(hosts: Sequence[Host]) -> str:
    """Return hosts by number and address, for a sentence."""
    return ", ".join(f"client {host.id} ({host.name})" for host in hosts)
