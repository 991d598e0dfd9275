"""Lists and kills the jobs of one host: the service `jobs` of its agent.

A request is a JSON object; the answer has several, of which the last marks the end:

    {"do": "list"}
        {"job": {...record...}, "launcher": true, "living": 4}          for each job
    {"do": "kill", "jobs": ["lenet-..."], "launcher_s": 10, "grace_s": 3}
        {"killed": "lenet-...", "count": 4}                             for each job
        {"problem": "job lenet-...: ..."}                               what failed
    {"end": true}

Law: only this user's jobs, and of these only processes that `poseidon.cluster.jobs.kill` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psutil

from poseidon.cluster.jobs.kill import KillTimeouts, job_processes, kill_job, live_process
from poseidon.cluster.jobs.registry import (
    NO_RECORD,
    JobRecord,
    Registry,
    check_job_id,
    record_fields,
    record_from_fields,
)
from poseidon.cluster.machinefile import is_loopback
from poseidon.errors import JobError, PoseidonError, UsageError
from poseidon.settings import read_settings

Answer = Mapping[str, object]
MAX_JOBS = 10_000
LOOKS_FOR_LISTENER = 3
"""The kernel's table of sockets is read in pieces: an entry can be missed while others come and
go.
"""
_ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJob:
    """A job as one host reports it.

    Attributes:
        record: that the host has.
        launcher: whether the process that started it on that host runs.
        living: how many processes of the record run there; not those that they or an agent have
            started besides.
    """

    record: JobRecord
    launcher: bool
    living: int

    def to_fields(self) -> Answer:
        """Return it as a line of the answer."""
        return {"job": record_fields(self.record), "launcher": self.launcher, "living": self.living}

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> HostJob:
        """Return the job in a line of the answer.

        Raises:
            JobError: the line is not a job.
        """
        record, launcher, living = (fields.get(name) for name in ("job", "launcher", "living"))
        if (
            not isinstance(record, dict)
            or not isinstance(launcher, bool)
            or not isinstance(living, int)
        ):
            raise JobError("its answer is not a job")
        try:
            return cls(record=record_from_fields(record), launcher=launcher, living=living)
        except NO_RECORD as error:
            raise JobError(f"its answer has a job that cannot be read: {error}") from error


def jobs_here(registry: Registry, warn: Callable[[str], None]) -> list[HostJob]:
    """Return the jobs of this user on this host; remove the records of those whose processes
    have all ended.

    Args:
        registry: with their records.
        warn: called with a sentence about a record that cannot be read or removed.

    Raises:
        JobError: the folder of records cannot be read.
    """
    found = []
    for record in readable_records(registry, warn):
        launcher = live_process(record.launcher) is not None
        living = sum(live_process(process) is not None for process in record.processes)
        if launcher or living or may_live_elsewhere(record) or job_processes(record.job, record):
            found.append(HostJob(record=record, launcher=launcher, living=living))
            continue
        try:
            registry.remove(record.job)
        except JobError as error:
            warn(str(error))
    return found


def readable_records(registry: Registry, warn: Callable[[str], None]) -> list[JobRecord]:
    """Return all records; call `warn` for those that cannot be read."""
    records = []
    for job in registry.jobs():
        try:
            record = registry.read(job)
        except JobError as error:
            warn(str(error))
            continue
        if record is not None:
            records.append(record)
    return records


def job_at(address: str, port: int) -> str | None:
    """Return the running job of this user that listens at an address of this host; None where no
    recorded one does.

    Raises:
        JobError: the folder of records cannot be read.
    """
    registry = Registry(read_settings().state_folder)
    records = readable_records(registry, lambda _: None)
    for record in records * LOOKS_FOR_LISTENER:
        launcher = live_process(record.launcher)
        processes = [
            *([launcher] if launcher is not None else []),
            *job_processes(record.job, record),
        ]
        if any(_listens(process, address.partition("%")[0], port) for process in processes):
            return record.job
    return None


def _listens(process: psutil.Process, address: str, port: int) -> bool:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return False
    own = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
    return any(bound.port == port and bound.ip in (address, *_ANY_ADDRESS) for bound in own)


def may_live_elsewhere(record: JobRecord) -> bool:
    """Return whether processes were started on other hosts, whose state is not known here."""
    return any(not is_loopback(process.host) for process in record.processes)


def answers(request: Mapping[str, object], registry: Registry) -> Iterable[Answer]:
    """Carry out a request; yield the lines of the answer.

    Args:
        request: see the module's docstring; it came from another machine.
        registry: of this host.
    """
    problems: list[str] = []
    try:
        if request.get("do") == "list":
            yield from (job.to_fields() for job in jobs_here(registry, problems.append))
        elif request.get("do") == "kill":
            timeouts = KillTimeouts(
                launcher_s=_seconds(request, "launcher_s"), grace_s=_seconds(request, "grace_s")
            )
            for job in _job_ids(request):
                yield from _kill(job, registry, timeouts)
        else:
            problems.append(
                "expected the request 'list' or 'kill'; is it another version of Poseidon?"
            )
    except PoseidonError as error:
        problems.append(str(error))
    yield from ({"problem": problem} for problem in problems)
    yield {"end": True}


def _kill(job: str, registry: Registry, timeouts: KillTimeouts) -> Iterable[Answer]:
    try:
        yield {"killed": job, "count": kill_job(job, registry, timeouts=timeouts)}
    except PoseidonError as error:
        yield {"problem": str(error)}


def _job_ids(request: Mapping[str, object]) -> list[str]:
    jobs = request.get("jobs")
    if (
        not isinstance(jobs, list)
        or len(jobs) > MAX_JOBS
        or not all(isinstance(job, str) for job in jobs)
    ):
        raise UsageError("expected a list of job ids")
    return [check_job_id(job) for job in jobs]


def _seconds(request: Mapping[str, object], name: str) -> float:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise UsageError(f"expected {name} from 0 to 3600 seconds, not {value!r:.80}")
    return float(value)
