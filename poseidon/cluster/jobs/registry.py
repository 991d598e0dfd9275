"""Job records: files by which the processes of a job are found without its launcher.

One file a job, `<state folder>/jobs/<this host>/<job>.json`. Where hosts share a home folder each
has a folder of its own, since it cannot check whether the processes of another host run.

Law: all folders from the state folder down are this user's, and only this user may write to them,
whatever the umask; records of other users are refused, since `kill` ends the processes that they
name. The file is complete at every moment (written under another name, then renamed), and names each
process by pid and time of creation, since a pid alone may be used again.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from poseidon.base.durable import write_whole
from poseidon.base.foreign_files import check_private, make_private, read_in
from poseidon.cluster.machinefile import Host, check_options, digest_of
from poseidon.cluster.process import RunningProcess
from poseidon.errors import JobError, MachinefileError, UsageError, limit_reached
from ps_server.json_fields import fields_of, plain, value_of

LARGEST_BYTES = 16 << 20
LATEST_S = 1e11
EXTRACTION = "extract_features"
"""The prefix of the ids of feature extractions."""
NO_RECORD = (ValueError, UsageError, MachinefileError)
"""What is raised for what is not a record."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProcess:
    """A process of a job.

    Attributes:
        name: in messages, `worker 1 (client 1, 127.0.0.1)`.
        host: on which it runs.
        pid: its process id there.
        created: its `creation` there.
    """

    name: str
    host: str
    pid: int
    created: str

    def __post_init__(self) -> None:
        # For kill(2) 0 and negative numbers mean groups: a damaged record must never get there.
        if self.pid <= 0:
            raise ValueError(f"{self.pid} is not a process id")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The record of a job.

    Attributes:
        job: its id.
        launcher: the process that supervises it.
        hostfile: absolute path of its machinefile; None when it had none.
        hosts: the machinefile's lines; none in the record on a host that an agent serves.
        joined: further hosts, that have joined it since.
        ssh_config: absolute path of its --ssh_config; None: OpenSSH's own files.
        output: absolute path of its output folder.
        started_s: seconds since 1970.
        processes: all that were started so far.
        lines: in the record on a host that an agent serves, the `digest` of the machinefile's lines.
    """

    job: str
    launcher: RecordedProcess
    hostfile: str | None
    hosts: tuple[Host, ...]
    output: str
    started_s: float
    processes: tuple[RecordedProcess, ...] = ()
    joined: tuple[Host, ...] = ()
    ssh_config: str | None = None
    lines: str = ""

    def __post_init__(self) -> None:
        check_job_id(self.job)
        if not 0 <= self.started_s < LATEST_S:
            raise ValueError(f"{self.started_s} is not a time in seconds since 1970")
        for host in self.all_hosts:
            check_options(host, f"client {host.id}")

    @property
    def all_hosts(self) -> tuple[Host, ...]:
        """The hosts on which its processes may run."""
        return (*self.hosts, *self.joined)

    @property
    def digest(self) -> str:
        """The digest of the machinefile's lines, see `digest_of`."""
        return self.lines or digest_of(self.hosts)

    def for_agents(self) -> JobRecord:
        """Return what the hosts of a job record: no other hosts, which would be many on each."""
        return replace(self, hosts=(), joined=(), processes=(), lines=self.digest)


def new_job_id(stem: str, now: datetime, token: str) -> str:
    """Return an id for a job: `cifar10_quick-20260105-204016-3f9a1c`.

    Args:
        stem: the name of what it trains; characters that are illegal in an id become `_`.
        now: local time of its start.
        token: random, so that no two jobs share an id.
    """
    clean = re.sub(r"[^A-Za-z0-9_]+", "_", stem).strip("_")[:40] or "job"
    return check_job_id(f"{clean}-{now:%Y%m%d-%H%M%S}-{token}")


def check_job_id(job: str) -> str:
    """Return the id itself, if it is legal as a file's name and as an argument.

    Raises:
        UsageError: it is not.
    """
    if not _JOB_ID.fullmatch(job):
        raise UsageError(
            f"'{job}' cannot be a job id: expected up to 80 letters, digits, '.', '_' and '-', "
            "the first a letter or digit"
        )
    return job


class Registry:
    """The records of this user's jobs.

    Args:
        state_folder: `Settings.state_folder`; made when first written to.
    """

    def __init__(self, state_folder: Path) -> None:
        self.folder = state_folder / "jobs" / re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
        """Where this host's records lie; it need not be there."""

    @property
    def _private(self) -> tuple[Path, ...]:
        """The folders that only this user may write to, from the top."""
        return self.folder.parents[1], self.folder.parent, self.folder

    def check(self) -> None:
        """Make sure that nobody else may write records, or requests beside them.

        Raises:
            JobError: a folder of them is another user's.
        """
        for folder in self._private:
            try:
                check_private(folder)
            except FileNotFoundError:
                return
            except OSError as error:
                raise JobError(
                    f"cannot read the records of jobs in {folder}: {_remedy(error)}"
                ) from error

    def write(self, record: JobRecord) -> None:
        """Write or replace a job's record.

        Raises:
            JobError: it cannot be written; the message has the path and the reason.
        """
        path = self._path(record.job)
        try:
            for folder in self._private:
                make_private(folder)
            write_whole(path, json.dumps(fields_of(record), indent=1, default=plain).encode())
        except OSError as error:
            raise JobError(f"cannot write the job's record {path}: {_remedy(error)}") from error

    def read(self, job: str) -> JobRecord | None:
        """Return a job's record, or None when there is none.

        Raises:
            UsageError: `job` cannot be a job id.
            JobError: the record is there and cannot be read, or is another job's.
        """
        path = self._path(job)
        self.check()
        try:
            content = read_in(self.folder, path.name, most_bytes=LARGEST_BYTES)
            record = value_of(JobRecord, json.loads(content))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(f"the job's record {path} cannot be read: {error.strerror}") from error
        except (*NO_RECORD, RecursionError) as error:
            raise JobError(
                f"the job's record {path} is damaged or from a different version ({error}); "
                "remove it by hand"
            ) from error
        if record.job != job:
            raise JobError(
                f"{path} is the record of a different job, {record.job}; remove it by hand"
            )
        return record

    def remove(self, job: str) -> None:
        """Forget a job; nothing happens when it is not there.

        Raises:
            JobError: it cannot be removed; the message has the reason.
        """
        path = self._path(job)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise JobError(f"cannot remove the job's record {path}: {error.strerror}") from error

    def jobs(self) -> tuple[str, ...]:
        """Return the ids of all recorded jobs, sorted by name; ignore other files.

        Raises:
            JobError: the folder cannot be read.
        """
        self.check()
        try:
            with os.scandir(self.folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise JobError(
                f"cannot read the records of jobs in {self.folder}: {_remedy(error)}"
            ) from error
        stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return tuple(stem for stem in stems if _JOB_ID.fullmatch(stem))

    def _path(self, job: str) -> Path:
        return self.folder / f"{check_job_id(job)}.json"


def _remedy(error: OSError) -> str:
    """Return why the folder of records cannot be used, and what to do."""
    return limit_reached(error) or (
        f"{error.strerror or error}; set $POSEIDON_HOME to a different folder"
    )


class Registration:
    """One job's record while its launcher runs; entered, it is removed at the end unless
    processes of the job are left.

    Args:
        registry: that keeps the record.
        record: at the start of the job; written at once.
    """

    def __init__(self, registry: Registry, record: JobRecord) -> None:
        self._registry = registry
        self.record = record
        """The record as it is now."""
        registry.write(record)

    def add(self, processes: Sequence[RunningProcess]) -> None:
        """Add processes to the record. Call it right after their start.

        One that is there already, of an earlier start, gets its new name.
        """
        added = [
            RecordedProcess(
                name=one.name.describe(), host=one.name.host, pid=one.pid, created=one.created
            )
            for one in processes
        ]
        known = {(one.host, one.pid) for one in added}
        others = [one for one in self.record.processes if (one.host, one.pid) not in known]
        self._change(processes=(*others, *added))

    def keep(self, processes: Iterable[RunningProcess]) -> None:
        """Remove all processes but these, which wait for the next start, from the record."""
        left = {(process.name.host, process.pid) for process in processes}
        kept = tuple(one for one in self.record.processes if (one.host, one.pid) in left)
        self._change(processes=kept)

    def joins(self, host: Host) -> None:
        """Add a host that takes part from now on, or tries to."""
        self._change(joined=(*self.record.joined, host))

    def left(self, number: int) -> None:
        """Remove a host that has joined and takes part no more, by its id."""
        left = tuple(host for host in self.record.joined if host.id != number)
        if left != self.record.joined:
            self._change(joined=left)

    def _change(self, **fields: Any) -> None:
        self.record = replace(self.record, **fields)
        self._registry.write(self.record)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.record.processes:
            with suppress(JobError):  # the next listing of jobs removes it
                self._registry.remove(self.record.job)
