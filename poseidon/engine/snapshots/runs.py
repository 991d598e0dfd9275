"""The run that a snapshot belongs to, and the one job that may write snapshots with a prefix.

    .<prefix>.running       beside the snapshots, while a process writes them: its job, host and process

Laws:
* A process that writes snapshots has a lock on that file. The kernel, or the server of a shared file
  system, ends the lock with the process, so what a killed job has left refuses nobody. Another
  process of the same job is not refused: a start follows one whose processes are still ending.
* The runs of a folder are numbered in the order in which they began. A run continues another one if
  it is the same job, or has resumed from that run's newest snapshot; it then has its number.
* Where the file system has no locks, nobody is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from poseidon.base.paths import own_command
from poseidon.engine.snapshots.checksums import Run, run_of, sums_path
from poseidon.engine.snapshots.rotation import all_runs, sealed
from poseidon.errors import SnapshotError

LARGEST_RECORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that has begun to write snapshots.

    Attributes:
        beside: the newest snapshot of another run with the same prefix that it does not continue;
            None: there is none.
    """

    run: Run
    beside: Path | None = None


class Prefixes:
    """The prefixes with which this process writes snapshots.

    Args:
        job: the id of its job; empty: it is one of its own.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._locks: dict[Path, int] = {}
        self._begun: dict[tuple[Path, str], Begun] = {}
        weakref.finalize(self, _release, self._locks, os.getpid())

    def take(self, prefix: Path, ending: str, resumed: Path | None = None) -> Begun:
        """Return the run to write snapshots for, after every other job was refused.

        Call it before each snapshot.

        Args:
            prefix: absolute.
            ending: of the states' names.
            resumed: the state that this run has resumed from.

        Raises:
            SnapshotError: another job that runs writes with this prefix.
        """
        self._lock(prefix)
        key = prefix, ending
        if key not in self._begun:
            self._begun[key] = self._begin(prefix, ending, resumed)
        return self._begun[key]

    def release(self) -> None:
        """Leave all prefixes to other jobs; the next `take` takes its own again."""
        _release(self._locks, os.getpid())

    def _begin(self, prefix: Path, ending: str, resumed: Path | None) -> Begun:
        found = sealed(prefix, ending)
        newest = found[-1] if found else None
        if newest is not None:
            run = run_of(newest)
            if (self._job and run.job == self._job) or _are_same(newest, resumed):
                return Begun(Run(number=run.number, job=self._job))
        number = 1 + max((run.number for run in all_runs(prefix.parent)), default=0)
        return Begun(Run(number=number, job=self._job), newest)

    def _lock(self, prefix: Path) -> None:
        path = prefix.with_name(f".{prefix.name}.running")
        own = self._locks.get(path)
        if own is not None:
            if _is_at(own, path):
                return
            os.close(self._locks.pop(path))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            try:
                lock = os.open(path, flags, 0o666)
            except OSError:
                return  # whatever it is, it is an error of the snapshot itself, or of nothing
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                record = os.pread(lock, LARGEST_RECORD_BYTES, 0).decode(errors="replace")
                os.close(lock)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    self._refuse(prefix, record)
                return
            if _is_at(lock, path):  # else its last owner has removed it meanwhile
                break
            os.close(lock)
        record = f"{self._job}\n{socket.gethostname()}\n{os.getpid()}\n"
        with suppress(OSError):  # on a full disk there is a lock still
            os.ftruncate(lock, 0)
            os.pwrite(lock, record.encode(), 0)
        self._locks[path] = lock

    def _refuse(self, prefix: Path, record: str) -> None:
        job, host, pid = [*(line.strip() for line in record.splitlines()), "", "", ""][:3]
        if job and job == self._job:
            return
        who = f"the job {job!r:.100}" if job else "another process"
        end = f"end it first: {own_command()} kill {job}" if job else "end it first"
        raise SnapshotError(
            f"{who}, which runs (pid {pid[:20]} on {host[:100]}), writes {prefix}_iter_*, and "
            f"each would replace and remove the other's files; use a different prefix, or {end}"
        )


def _are_same(newest: Path, resumed: Path | None) -> bool:
    if resumed is None:
        return False
    with suppress(OSError):
        return sums_path(newest).read_bytes() == sums_path(resumed).read_bytes()
    return False


def _is_at(lock: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False))
    return False


def _release(locks: dict[Path, int], owner: int) -> None:
    """Remove the files that this process has locked, and end the locks."""
    for path, lock in locks.items():
        with suppress(OSError):
            if os.getpid() == owner and _is_at(lock, path):
                path.unlink()
            os.close(lock)
    locks.clear()
