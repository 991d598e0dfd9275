"""The hosts of an elastic job, and the changes that its next start makes: hosts that come back,
join or leave.

Law: a change waits for the next start, which all workers reach at one memory snapshot.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from poseidon.cluster.jobs.registry import Registration, Registry
from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.errors import JobError, counted
from poseidon.launcher.job import Job
from poseidon.launcher.newcomers import Newcomers, Prepared, Waiting, of_host
from poseidon.launcher.processes import Start
from poseidon.settings import read_settings


class HostChanges(JobListener):
    """The changes of one job's hosts; it hears when a start runs.

    Args:
        job: the job.
        registration: its record.
        requests: takes those to regroup.
        report: to the user.
    """

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
        self.report = report
        self._hosts = {host.id: host for host in job.site.hosts}
        self._went_on = False  # from memory: without memory snapshots no host is taken in again
        self._running = threading.Event()
        self._arrived: queue.SimpleQueue[tuple[Host, Sequence[Prepared]]] = queue.SimpleQueue()
        self._leaving: set[int] = set()
        self._joining: Host | None = None
        self._commands = RequestFiles(Registry(read_settings().state_folder).folder, job.id)
        self._newcomers = Newcomers(self, job.request.max_rejoins)

    def start(self) -> None:
        """Begin to take hosts in, and requests."""
        self._newcomers.start()

    def on_started(self) -> None:
        """See `JobListener`."""
        self._running.set()

    def on_ended(self) -> None:
        """Note that the start which ran has ended."""
        self._running.clear()

    def close(self) -> None:
        """Take nothing in any more."""
        self._newcomers.close()
        self._commands.close()

    @property
    def leaving(self) -> frozenset[int]:
        """The ids of the hosts that the next start does without."""
        return frozenset(self._leaving)

    def go_on(self, without: Collection[int]) -> None:
        """Note that the job continues from memory, without these hosts."""
        self._went_on = True
        for number in without:
            self._leaving.discard(number)
            self._hosts.pop(number, None)

    def arrivals(self, present: Sequence[Host]) -> list[Host]:
        """Take what was prepared since the last start; return the hosts that are new with it."""
        pool = self._job.site.paused
        new: list[Host] = []
        self._requests.forget_regroup()
        while not self._arrived.empty():
            host, prepared = self._arrived.get()
            for one in prepared:
                pool.add(one.spec, one.process)
            if of_host(prepared, host) and all(host.id != each.id for each in (*present, *new)):
                new.append(host)
        return new

    def take_request(self) -> None:
        """See `Preparing`."""
        if not self._running.is_set() or self._leaving or self._joining:
            return
        request = self._commands.take()
        if request is not None and request.do == "join":
            self._join(request.host)
        elif request is not None:
            self._leave(request)

    def _join(self, address: str) -> None:
        job, here = self._job, self._job.site.opens_files_here
        workers = job.plan.worker_count + job.plan.workers_per_host
        obstacle = ""
        if not here and any(address == host.address for host in self._hosts.values()):
            obstacle = f"{address:.80} is a host of the job already"
        elif here != is_loopback(address):
            expected = "127.0.0.1" if here else "one that the others reach, as they are"
            obstacle = f"{address:.80} cannot reach the job's hosts; expected {expected}"
        elif job.virtual_workers.count < workers:
            obstacle = (
                f"the job has {counted(job.virtual_workers.count, 'virtual worker')}, too few for "
                f"{workers} workers; a job that others may join is started with --virtual_workers"
            )
        if obstacle:
            self._commands.answer(obstacle, done=False)
            return
        self._joining = Host(id=max(self._hosts) + 1, address=address, port=0)
        self._newcomers.expect(self._joining)
        self._hosts[self._joining.id] = self._joining
        self._went_on = True

    def failed(self, host: Host, why: str, *, first: bool) -> None:
        """See `Preparing`."""
        if self._joining is not None and self._joining.id == host.id:
            del self._hosts[host.id]
            self._joining = None
            self._commands.answer(f"{host.address} cannot take part: {why}", done=False)
        elif first:
            self.report(f"{named([host])} is not back: {why}")

    def _leave(self, request: HostRequest) -> None:
        hosts = self._job.site.hosts
        leaving = [each for each in hosts if request.host in (each.address, str(each.id))]
        working = [each for each in hosts if each.works and each not in leaving[:1]]
        obstacle = ""
        if request.do != "leave":
            obstacle = f"the launcher does not know the request '{request.do:.20}'"
        elif not leaving:
            known = ", ".join(f"{each.id} ({each.address})" for each in hosts)
            obstacle = f"the job has no host {request.host:.80}; its clients are {known}"
        elif not working:
            obstacle = f"{request.host} is the last host of the job; poseidon kill ends the job"
        elif len(working) * self._job.plan.workers_per_host < self._job.request.min_workers:
            obstacle = f"without {request.host} the job has fewer workers than --min_workers"
        if obstacle:
            self._commands.answer(obstacle, done=False)
            return
        self._leaving.add(leaving[0].id)
        self._requests.regroup()
        text = f"{named(leaving[:1])} leaves the job after the next iteration"
        self._commands.answer(text, done=True)

    def missing_hosts(self) -> Sequence[Host]:
        """See `Preparing`."""
        present = {host.id for host in self._job.site.hosts}
        if not (self._went_on and self._running.is_set()) or not self._arrived.empty():
            return ()
        return [host for number, host in self._hosts.items() if number not in present]

    def prepare(self, host: Host, listener: Waiting) -> list[Prepared]:
        """See `Preparing`."""
        site, record = self._job.site, self._registration.record
        host = site.reach(host, record)
        self._hosts[host.id] = host
        hosts = [*(each for each in site.hosts if each.id != host.id), host]
        job = self._job.with_hosts(hosts)
        point = StartingPoint(memory=True)
        start = replace(Start.new(0, point, job.plan, job.request.encrypt), aside=True)
        roles = {role.process: role for role in job.plan.roles}
        specs = site.paused.missing([job.spec(role, start) for role in roles.values()])
        prepared: list[Prepared] = []
        try:
            for spec in specs:
                process = site.start_aside(spec, roles[spec.name].host, listener)
                prepared.append(Prepared(spec=spec, process=process))
        except JobError:
            for one in prepared:
                one.process.kill()
            raise
        return prepared

    def take_in(self, host: Host, prepared: Sequence[Prepared]) -> None:
        """See `Preparing`."""
        self._arrived.put((self._hosts[host.id], prepared))
        self._requests.regroup()
        if self._joining is not None and self._joining.id == host.id:
            self._joining = None
            self._commands.answer(f"{named([host])} takes part from here on", done=True)


def named(hosts: Sequence[Host]) -> str:
    """Return hosts by number and address, for a sentence."""
    return ", ".join(f"client {host.id} ({host.address})" for host in hosts)
