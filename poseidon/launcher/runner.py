"""Runs a job: prepares its hosts, starts its processes, observes them, and restarts them after a
loss.

Law: connections, listeners and processes end with the run, whichever way it ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from poseidon.base.paths import short_path
from poseidon.base.settings import read_settings
from poseidon.cluster.events import Paused
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.jobs.registry import Registration
from poseidon.cluster.supervision.background import (
    StartReport,
    how_to_follow,
    run_in_background,
    this_command,
)
from poseidon.cluster.supervision.loop import run_job
from poseidon.cluster.supervision.restarts import Restarts, StartingPoint, describe_ending
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import DEFAULT_SUPERVISION, JobResult, Pausing
from poseidon.engine.document import WorkKind
from poseidon.engine.snapshot_runs import COPIES
from poseidon.errors import JobError, PoseidonError, UsageError, counted
from poseidon.launcher.balancing import Balancing
from poseidon.launcher.closing_lines import aligned
from poseidon.launcher.host_changes import HostChanges, named
from poseidon.launcher.job import Job
from poseidon.launcher.job_folder import output_folder, register_job, remove_unused
from poseidon.launcher.listeners import (
    DashboardPage,
    Listeners,
    PlanFile,
    RemoteLogs,
    StatisticsFile,
    StragglerReports,
)
from poseidon.launcher.processes import Start
from poseidon.launcher.sinks import FILE_NAME as METRICS_FILE
from poseidon.launcher.sinks import JobRecords, JsonLines, Prometheus, RecordSink, TensorBoard
from poseidon.launcher.snapshots import SnapshotList
from poseidon.launcher.survivors import find_survivors
from poseidon.launcher.terminal import Terminal

_POLL_S = 0.1


def launch(make_job: Callable[[], Job]) -> int:
    """Make a job and run it, here or in the background; return the exit code.

    Args:
        make_job: makes it, and raises what is wrong with it.

    Raises:
        PoseidonError: a mistake in what the job is made of, or it failed.
    """
    report = StartReport(read_settings().status_fd)
    try:
        job = make_job()
        return start_in_background(job) if job.request.background else run(job, report)
    except PoseidonError as error:
        report.failed(str(error), error.exit_code)
        raise


def start_in_background(job: Job) -> int:
    """Start this command again, detached, and return its exit code once the job runs."""
    argv = job.background_argv([f"--job={job.id}", f"--output={job.output}"])
    log = job.output / "launcher.log"
    new = not job.output.exists()
    try:
        pid = run_in_background(
            this_command(argv), log, timeout_s=DEFAULT_SUPERVISION.start_timeout_s + 30
        )
    except JobError:
        if new:
            remove_unused(job.output)
        raise
    print(how_to_follow(job.id, pid, log))
    return 0


def run(job: Job, report: StartReport) -> int:
    """Run a job to its end; return the exit code."""
    try:
        job.site.prepare(job.id, job.needs)
        job.renew_plan()  # now with the addresses of the hosts
        job.import_ahead()
        with (
            output_folder(job.output),
            register_job(
                job.id,
                job.request.hostfile,
                job.site.recorded_hosts,
                job.output,
                job.request.ssh_config,
            ) as registration,
        ):
            return _JobRun(job, registration, report).run()
    finally:
        job.site.close()


class _JobRun:
    """One run of a job, with its restarts. See `RestartDriver`."""

    def __init__(self, job: Job, registration: Registration, report: StartReport) -> None:
        self._job = job
        self._registration = registration
        self._requests = SignalRequests(job.request.supervision_settings())
        self._terminal = Terminal(
            job.title,
            sys.stderr,
            on_started=report.started,
            shown=job.request.show_logs,
            progress=job.request.progress,
            interval_s=job.request.progress_interval,
            in_a_hurry=lambda: self._requests.asked_to_stop,
        )
        show = self._terminal.print
        copies = job.site.snapshot_copies(
            lambda: job.plan.workers[0].host, job.output / COPIES, show
        )
        self._point = job.origin
        self._snapshots = SnapshotList(job.origin, show, copies)
        self._records = JobRecords(
            lambda: {
                "job": job.id,
                "workers": job.plan.worker_count,
                "shards": job.plan.shard_count,
                **({"script": True} if job.kind is WorkKind.SCRIPT else {}),
                "addresses": {
                    host.peer_address or host.address: host.address for host in job.plan.hosts
                },
            },
            self._sinks(),
            lambda sentence: show(f"warning: {sentence}"),
        )
        self._plan_file = PlanFile(job.output, show)
        pages = [DashboardPage(job.output, show)] if job.request.dashboard else []
        self._changes = HostChanges(job, registration, self._requests, show)
        self._balancing = Balancing(job, self._requests, show)
        self._listeners = Listeners(  # files before the terminal: what is shown is already kept
            self._changes,
            self._balancing,
            self._snapshots,
            StragglerReports(show),
            StatisticsFile(job.id, job.output, show),
            self._records,
            RemoteLogs(job.output, show),
            self._plan_file,
            *pages,
            self._terminal,
        )

    def _sinks(self) -> list[RecordSink]:
        request = self._job.request
        sinks: list[RecordSink] = [JsonLines(self._job.output / METRICS_FILE)]
        if request.tensorboard_dir is not None:
            sinks.append(TensorBoard(request.tensorboard_dir))
        if request.metrics_port is not None:
            served = Prometheus(request.metrics_port, self._job.id)
            self._terminal.print(f"metrics at http://127.0.0.1:{served.port}/metrics")
            sinks.append(served)
        return sinks

    def run(self) -> int:
        """Start the processes and stay with them to the job's end; return the exit code."""
        job, show = self._job, self._terminal.print
        show(f"job {job.id}: {job.description()}; logs in {short_path(job.output)}")
        for note in job.notes():
            show(note)
        try:
            with self._requests:
                self._changes.start()
                restarts = Restarts(self, job.max_restarts, job.request.return_timeout)
                ended = restarts.run()
                self._records.ended(ended.result.outcome.value)
                self._snapshots.finish(ended.result.outcome, self._requests)
                newest = self._snapshots.newest()
        except PoseidonError:
            self._records.ended("failed")
            self._print_how_to_resume()
            raise
        finally:
            self._listeners.close()
        for line in aligned(job.final_report(ended.result, newest, self._terminal.scores())):
            show(line)
        show(describe_ending(job.id, ended))
        return ended.result.exit_code

    def _print_how_to_resume(self) -> None:
        newest = self._snapshots.newest()
        if newest.state and newest != self._job.origin:
            for line in aligned([("resume", self._job.resume_line(Path(newest.state)))]):
                self._terminal.print(line)

    def start(self, attempt: int, point: StartingPoint) -> JobResult:
        job, self._point = self._job, point
        try:
            if not point.memory:
                self._make_ready(point)
            exchange_plan = self._plan_file.plan or job.exchange_plan
            start = Start.new(attempt, point, job.plan, job.request.encrypt, exchange_plan)
            workers = counted(job.plan.worker_count, "worker")
            shards = (
                f" and {counted(job.plan.shard_count, 'shard')}" if job.plan.shard_count else ""
            )
            if not point.memory:
                if job.request.memory_snapshot_every and not job.elastic and not attempt:
                    self._terminal.print(
                        f"warning: --elastic=every has no effect, because {job.fixed_because}"
                    )
                self._terminal.print(f"starting {workers}{shards}...")
            specs = {role.process: job.spec(role, start) for role in job.plan.roles}
            self._registration.keep(job.site.paused.end_others(specs.values(), job.site.hosts))
            pausing = Pausing.ALWAYS if point.memory else Pausing.RUNNING
            return run_job(
                job.plan,
                lambda role: specs[role.process],
                job.site.start,
                listener=self._listeners,
                settings=job.request.supervision_settings(),
                registration=self._registration,
                requests=self._requests,
                pausing=pausing if job.elastic else Pausing.NEVER,
                kept=job.site.paused.keep,
            )
        finally:
            self._changes.on_ended()
            self._balancing.on_ended()
            job.site.end()

    def _make_ready(self, point: StartingPoint) -> None:
        """Make the hosts ready for new processes, unless the user has stopped the job meanwhile."""
        job = self._job
        job.site.begin(self._registration.record, job.files(point))
        if job.site.hosts != job.plan.hosts:  # a client is on another node now
            job.renew_plan()
        for imported in job.import_ahead():
            while not imported.wait(_POLL_S):
                self._check_not_stopped()
        self._check_not_stopped()  # while hosts were connected and files sent

    def _check_not_stopped(self) -> None:
        if self._requests.stop_wanted():
            error = JobError("the job was stopped before it had started")
            error.exit_code = self._requests.stop_code
            raise error

    def memory_point(self) -> tuple[StartingPoint, str] | None:
        job = self._job
        paused = job.site.paused.of(job.plan)
        apart = self._unconnected(paused)
        leaving = self._changes.leaving | apart
        found = find_survivors(
            job.plan, paused, min_workers=job.request.min_workers, leaving=leaving
        )
        if found is None:
            return None
        before = job.site.hosts
        new = self._changes.arrivals(found.hosts)
        job.site.go_on([*found.hosts, *new])
        try:
            job.renew_plan()
        except UsageError:  # no host with shards is left
            job.site.go_on(before)
            job.renew_plan()
            return None
        self._changes.go_on(without=leaving - {host.id for host in found.hosts})
        if out := [host for host in found.lost if host.id in apart]:
            self._terminal.print(
                f"{named(out)} cannot take part: it could not connect to the job's other hosts; open "
                f"their ports, then: poseidon join {job.id} --host={out[0].address}"
            )
        groups = [("without", found.lost), ("with", new)]
        changes = [f"{word} {named(hosts)}" for word, hosts in groups if hosts]
        phrase = f"{' and '.join(changes) or 'with the same clients'}: {job.description()}"
        return StartingPoint(iteration=found.iteration, memory=True), phrase

    def _unconnected(self, paused: Mapping[ProcessName, Paused]) -> frozenset[int]:
        """Return the hosts that were new with the start that has ended, if it came to no snapshot
        though no process was lost: they and the others do not reach each other.
        """
        newest = max((at.snapshot or 0 for at in paused.values()), default=0)
        in_vain = self._point.memory and newest <= self._point.iteration
        is_whole = len(paused) == len(self._job.plan.roles)
        return self._changes.new if in_vain and is_whole else frozenset()

    def how_to_restart(self) -> str:
        if self._job.request.max_restarts is not None:
            return ""
        newest = self._snapshots.newest()
        where = f"from {short_path(Path(newest.state))}" if newest.state else newest.beginning
        return f"with --max_restarts=N it continues {where} by itself"

    def from_disk_because(self) -> str:
        job = self._job
        if job.plan.working_hosts == 1:
            return ""
        lost = (
            "no snapshot in memory is left, or fewer workers than "
            f"--elastic=min_workers={job.request.min_workers}"
        )
        return job.fixed_because or lost

    def end_paused(self) -> None:
        self._job.site.paused.end()
        self._job.site.end()

    def starting_point(self) -> StartingPoint:
        return self._snapshots.newest_intact()

    def drop_missing_hosts(self) -> str:
        job = self._job
        missing = job.site.drop_missing() if job.shares_data() else ()
        if not missing:
            return ""
        try:
            job.renew_plan()
        except UsageError:
            return ""  # no host with shards is left
        if job.plan.worker_count < job.request.min_workers:
            return ""
        return f"continuing without {named(missing)}: {job.description()} from here on"

    def report(self, text: str) -> None:
        self._terminal.print(text)

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if self._requests.stop_wanted():
                return True
            time.sleep(_POLL_S)
        return False
