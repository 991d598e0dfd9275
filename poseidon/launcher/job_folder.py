"""A job's folder, record and logs: made at its start, and found again by a job id, a folder or a
log.

Law: a folder that a job made goes again if the job failed before it wrote anything.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from poseidon.base.foreign_files import open_in, read_definition, read_end
from poseidon.base.paths import own_command, short_path
from poseidon.base.settings import read_settings
from poseidon.base.text_files import LONGEST_LINE, decoded
from poseidon.cluster.jobs.kill import AGENT, live_process
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registration, Registry
from poseidon.cluster.jobs.this_host import readable_records
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import creation
from poseidon.engine.snapshot_runs import newest_state
from poseidon.errors import DataError, JobError, SnapshotError
from poseidon.launcher.listeners import REMOTE_LOGS
from poseidon.launcher.sinks import FILE_NAME as METRICS_FILE
from poseidon.observe.metrics.job_records import LONGEST_LINE as LONGEST_RECORD
from poseidon.observe.metrics.job_records import Record, decode_record
from poseidon.observe.metrics.job_statistics import FILE_NAME
from poseidon.observe.metrics.training_log import TrainingLog, parse_log, script_log

OUTPUT = Path("output")
"""Where jobs have their folders without --output."""
LARGEST_LOG = 1 << 30
RECENT_BYTES = 64 << 20
"""Of the records of a job, in which the newest snapshot is looked for."""


def register_job(
    job: str,
    hostfile: str | None,
    hosts: tuple[Host, ...],
    output: Path,
    ssh_config: Path | None = None,
) -> Registration:
    """Record a job that this process launches, for `poseidon ps` and `poseidon kill`.

    Raises:
        JobError: another job with this folder runs, or the record cannot be written.
    """
    registry = Registry(read_settings().state_folder)
    for other in (
        record for record in _running_in(output, registry) if record.launcher.name != AGENT
    ):
        raise JobError(
            f"{output} is the folder of the job {other.job}, which runs (launcher pid "
            f"{other.launcher.pid}); name a different --output, or end that job first: "
            f"{own_command()} kill {other.job}"
        )
    me = os.getpid()
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=me, created=creation(me))
    record = JobRecord(
        job=job,
        launcher=launcher,
        hostfile=str(Path(hostfile).resolve()) if hostfile else None,
        hosts=hosts,
        output=str(output),
        started_s=datetime.now().timestamp(),
        ssh_config=str(ssh_config.resolve()) if ssh_config is not None else None,
    )
    return Registration(registry, record)


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make a job's folder. A new one is removed if the block fails and nothing was written there.

    Raises:
        JobError: it cannot be made.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot make the output folder {folder}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if new:
            remove_unused(folder, [folder / FILE_NAME, folder / METRICS_FILE])
        raise


def remove_unused(folder: Path, ignored: Collection[Path] = ()) -> None:
    """Remove a job's folder that holds nothing but empty files.

    Args:
        ignored: files in it that are worth nothing without the job.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path not in ignored]
    if not any(path.stat().st_size for path in files):
        shutil.rmtree(folder, ignore_errors=True)


def local_records(registry: Registry) -> list[JobRecord]:
    """Return all records of this machine that can be read; the others are warnings on standard
    error.
    """
    return readable_records(registry, lambda problem: print(f"warning: {problem}", file=sys.stderr))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeantJob:
    """The job that a command line means.

    Attributes:
        record: its record on this machine; None: it has ended, or runs elsewhere.
    """

    folder: Path
    record: JobRecord | None = None


def meant_job(job: str | None) -> MeantJob:
    """Return the job that a command line means.

    Args:
        job: its id or its output folder. None: the job of the current folder that runs or, if none
            does, has ended last; if there is none, the newest that runs from another folder. A line
            on standard error says which it is.

    Raises:
        JobError: there is no such job, or its record cannot be read.
    """
    registry = Registry(read_settings().state_folder)
    if job is None:
        return _newest(local_records(registry))
    record = registry.read(job) if job in registry.jobs() else None
    if record is not None:
        return MeantJob(folder=Path(record.output), record=record)
    for folder in (Path(job), OUTPUT / job):
        if folder.is_dir():
            of_folder = _with_folder(folder, readable_records(registry, lambda _: None))
            return MeantJob(folder=folder, record=of_folder[-1] if of_folder else None)
    raise JobError(
        f"'{job}' is neither a running job, nor a folder, nor a job in {OUTPUT}/; "
        f"`{own_command()} ps` lists the running ones"
    )


def job_folder(job: str | None) -> Path:
    """Return the output folder of a job; see `meant_job`."""
    return meant_job(job).folder


def running_job(job: str | None) -> JobRecord:
    """Return the record of a job whose launcher runs on this machine.

    Args:
        job: see `meant_job`.

    Raises:
        JobError: it does not run here.
    """
    meant = meant_job(job)
    if meant.record is None or live_process(meant.record.launcher) is None:
        name = job or meant.folder
        raise JobError(
            f"no launcher of the job {name} runs on this machine; `{own_command()} ps` lists the jobs"
        )
    return meant.record


def ended_job(job: str) -> Path | None:
    """Return the folder under output/ of the job with the id `job`, which no longer runs; None
    where there is none.
    """
    folder = OUTPUT / job
    return folder if Path(job).name == job and folder.is_dir() else None


def _newest(records: Sequence[JobRecord]) -> MeantJob:
    begun = [record for record in records if (Path(record.output) / FILE_NAME).exists()]
    by_start = sorted(begun, key=lambda record: record.started_s)
    here = [record for record in by_start if Path(record.output).is_relative_to(Path.cwd())]
    ended = [(path.stat().st_mtime, path.parent) for path in OUTPUT.glob(f"*/{FILE_NAME}")]
    if here or (by_start and not ended):
        newest = (here or by_start)[-1]
        meant = MeantJob(folder=Path(newest.output), record=newest)
    elif ended:
        meant = MeantJob(folder=max(ended)[1])
    else:
        raise JobError(
            f"no job is running, and {OUTPUT}/ holds none that has ended; expected a job's id or "
            "its output folder"
        )
    name = meant.folder.name if meant.record is None else meant.record.job
    print(f"job {name} in {short_path(meant.folder)}", file=sys.stderr)
    return meant


def find_snapshot(given: str, ending: str = ".solverstate") -> Path:
    """Return the snapshot that --snapshot names: a file, or the newest of a job, by its id or
    its folder.

    Args:
        ending: of the names of snapshots.

    Raises:
        SnapshotError: there is none.
    """
    if Path(given).is_file():
        return Path(given)
    folder = folder_of_snapshot(given)
    try:
        return newest_state(folder, ending)
    except SnapshotError:
        elsewhere = _recorded_snapshot(folder, ending)
        if elsewhere is None:
            raise
        return elsewhere


def folder_of_snapshot(given: str) -> Path:
    """Return the folder of the job that --snapshot names by its id or its folder.

    Raises:
        SnapshotError: there is none.
    """
    try:
        return job_folder(given)
    except JobError as error:
        raise SnapshotError(
            f"--snapshot: there is no file {given}, nor a folder or a job of that name"
        ) from error


def _recorded_snapshot(folder: Path, ending: str) -> Path | None:
    """Return the last snapshot on record in a job's folder, of those that still exist; None if
    there is none.

    The solver's snapshot_prefix, or the prefix of a script, puts it in another folder.
    """
    try:
        content = read_end(folder.resolve(), METRICS_FILE, most_bytes=RECENT_BYTES)
        owner = folder.stat().st_uid
    except OSError:
        return None
    for line in reversed(content.splitlines()):
        record = decode_record(line)
        if record is None or record["kind"] != "snapshot":
            continue
        path = Path(record["path"])
        with suppress(OSError, ValueError):
            if path.name.endswith(ending) and path.is_file() and path.stat().st_uid == owner:
                return path
    return None


def log_paths(folder: Path) -> Mapping[str, Path]:
    """Return the logs of a job by the names of its processes, workers first.

    Of two logs of one process it is the one that the launcher keeps.
    """
    found = {
        path.stem: path
        for place in (folder, folder / REMOTE_LOGS)
        for path in place.glob("*_*.log")
    }
    numbered = [
        (role, int(number), path)
        for stem, path in found.items()
        for role, _, number in [stem.partition("_")]
        if role in ("worker", "shard") and number.isdecimal()
    ]
    ordered = sorted(numbered, key=lambda entry: (entry[0] != "worker", entry[1]))
    return {f"{role} {number}": path for role, number, path in ordered}


def find_training_log(given: str | None) -> tuple[str, Path]:
    """Return a name for a training log, and its path.

    Args:
        given: a log, or the id or folder of a job, whose worker 0 has the log; of a script it is
            `metrics.jsonl`. None: the job that was started last.

    Raises:
        DataError: there is neither; or the job has no log of worker 0, or one that is refused, see
            `open_in`.
        JobError: there is no last job.
    """
    path = Path(given) if given is not None else None
    if path is not None and path.exists() and not path.is_dir():
        return path.name, path
    try:
        folder = job_folder(given)
    except JobError as error:
        if path is None:
            raise
        raise DataError(
            f"there is no log {given}, nor a job of that id or folder; `{own_command()} ps` lists "
            "the running ones"
        ) from error
    start = next((record for record in read_records(folder) if record["kind"] == "start"), {})
    of_script = start.get("script", False)
    log = folder / METRICS_FILE if of_script else log_paths(folder).get("worker 0")
    if log is None:
        raise DataError(f"{folder} holds no log of worker 0; expected a job's folder or a log")
    try:
        open_in(folder.resolve(), log.relative_to(folder)).close()
    except OSError as error:
        raise DataError(f"cannot read the log {log}: {error.strerror}") from error
    return folder.absolute().name, log


def read_training_log(path: Path) -> TrainingLog:
    """Return the tables of a log file, which began in the year of its last change, or before; or
    of a script's `metrics.jsonl`.

    Raises:
        DataError: it cannot be read, or has no output of any iteration.
    """
    if path.name == METRICS_FILE:
        table = script_log(read_records(path.parent))
        if not table.train:
            raise DataError(
                f"{path} has no logged value; call group.log(loss=loss) in the script, or "
                "poseidon.log() under --ddp"
            )
        return table
    try:
        content = read_definition(path, most_bytes=LARGEST_LOG)
        text = decoded(content, errors="backslashreplace")
        year = datetime.fromtimestamp(path.stat().st_mtime).year
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(f"cannot read the log {path}: {reason}") from error
    log = parse_log(text.split("\n"), year)
    if not log.train and not log.test:
        raise DataError(
            f"{path} has no line of a net's output; expected a log of Caffe or of `poseidon train` "
            "(output/<job>/worker_0.log)"
        )
    return log


def read_records(folder: Path) -> Iterator[Record]:
    """Yield the records of a job's `metrics.jsonl`; none if it cannot be read."""
    with suppress(OSError), open_in(folder.resolve(), METRICS_FILE) as file:
        while line := file.readline(LONGEST_RECORD + 1):
            record = decode_record(line)
            if record is not None:
                yield record


class LogLines:
    """The whole lines of a growing file.

    Each iteration yields those that came since the last one.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._part = ""

    def __iter__(self) -> Iterator[str]:
        while piece := self._file.readline(LONGEST_LINE):
            self._part += piece
            if self._part.endswith("\n") or len(self._part) >= LONGEST_LINE:
                line, self._part = self._part.removesuffix("\n"), ""
                yield line


def is_running(folder: Path) -> bool:
    """Return whether the launcher of a job runs on this machine."""
    return bool(_running_in(folder, Registry(read_settings().state_folder)))


def _running_in(folder: Path, registry: Registry) -> list[JobRecord]:
    """Return the jobs of this machine with this folder whose launcher, or agent, runs."""
    mine = _with_folder(folder, readable_records(registry, lambda _: None))
    return [record for record in mine if live_process(record.launcher) is not None]


def _with_folder(folder: Path, records: Sequence[JobRecord]) -> list[JobRecord]:
    """Return the jobs with an output folder, the newest last."""
    found = [record for record in records if Path(record.output).resolve() == folder.resolve()]
    return sorted(found, key=lambda record: record.started_s)
