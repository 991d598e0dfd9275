"""The snapshots with one prefix: the runs that they belong to, the newest of them, and the removal of
old ones.

    .<prefix>.running       beside the snapshots, while a process writes them: its job, host and process

Laws:
* One job writes the snapshots with a prefix. Its processes have a lock on that file. The kernel, or the
  server of a shared file system, ends the lock with the process, so a killed job blocks nobody. Where
  the file system has no locks, no job is refused.
* The runs of a folder are numbered in the order in which they began. A job continues a run, and keeps
  its number, if the run is its own or if it has resumed from the run's newest snapshot.
* The newest snapshot is one of the run that began last, whatever its iteration: a new run may be
  shorter than an older one.
* Only complete snapshots with checksums are removed, only after a newer one is complete, and never one
  of another run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from poseidon.base.foreign_files import open_in
from poseidon.base.paths import own_command
from poseidon.engine.snapshot_files import (
    SUFFIX,
    Run,
    find_damage,
    run_of,
    sealed_files,
    sums_path,
)
from poseidon.errors import SnapshotError

CHECKPOINT = ".pt"
"""The suffix of a checkpoint of `poseidon run`; the other snapshots are Caffe's states."""
COPIES = "snapshots"
"""The folder for copies of other hosts' snapshots, in the job's folder on the launcher's host."""


def snapshots_before(state: Path) -> list[Path]:
    """Return the states with checksums, the prefix and the run of `state`, and a smaller iteration,
    oldest first.
    """
    prefix, iteration, ending = _parts(state.name)
    run = run_of(state).number
    return [
        path
        for number, own, path in _sealed(state.parent, prefix, ending)
        if number == run and own < iteration
    ]


def sealed(prefix: Path, ending: str) -> list[Path]:
    """Return the states with this prefix and checksums: of each run those of later iterations
    last, and those of later runs after those of earlier ones.
    """
    return [path for *_, path in _sealed(prefix.parent, prefix.name, ending)]


def newest_intact(prefix: Path, ending: str) -> Path | None:
    """Return the last state of `sealed` whose files match their checksums, or None."""
    found = reversed(sealed(prefix, ending))
    return next((path for path in found if find_damage(path) is None), None)


def later_of_others(state: Path) -> Path | None:
    """Return the state with the prefix of `state` and the highest iteration, if that is higher:
    of another run; else None.
    """
    prefix, iteration, ending = _parts(state.name)
    found = [(own, path) for _, own, path in _sealed(state.parent, prefix, ending)]
    highest, path = max(found, default=(iteration, state))
    return path if highest > iteration else None


def all_runs(folder: Path) -> list[Run]:
    """Return the runs of all snapshots in a folder."""
    return [
        run_of(path.with_name(path.name.removesuffix(SUFFIX))) for path in folder.glob(f"*{SUFFIX}")
    ]


def _sealed(folder: Path, prefix: str, ending: str) -> list[tuple[int, int, Path]]:
    """Return the number of the run and the iteration of each, in order."""
    found = []
    for path in folder.glob(f"*_iter_*{ending}"):
        try:
            other, number, other_ending = _parts(path.name)
        except ValueError:
            continue
        if other == prefix and other_ending == ending and sums_path(path).exists():
            found.append((run_of(path).number, number, path))
    return sorted(found)


def newest_state(folder: Path, ending: str = ".solverstate") -> Path:
    """Return the state of the highest iteration of the newest run in a job's folder or among the
    launcher's copies in it.

    Snapshots with checksums are preferred: others are by Caffe or an older version, or incomplete.
    The folder may be another user's: links are passed over; see `poseidon.base.foreign_files`.

    Args:
        folder: the folder of a job, or another folder with snapshots.
        ending: the suffix of their names; for states, HDF5 files count too.

    Raises:
        SnapshotError: there is no snapshot.
    """
    found = []
    for path in (
        path for parent in (folder, folder / COPIES) for path in parent.glob(f"*{ending}*")
    ):
        with suppress(ValueError, OSError):
            open_in(folder.resolve(), path.relative_to(folder)).close()
            key = sums_path(path).exists(), run_of(path).number, _parts(path.name)[1]
            found.append((key, path))
    if not found:
        raise SnapshotError(f"{folder} has no snapshot; expected a file <prefix>_iter_<N>{ending}")
    return max(found)[1]


def remove_older(state: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` snapshots of a run. Return the states that were removed.

    Checksums are removed first, to mark the rest as incomplete.

    Args:
        state: the newest state, which is complete.
        keep: the number of snapshots to keep, including this one; 0: all.

    Raises:
        SnapshotError: a file cannot be removed.
    """
    if keep < 1:
        return []
    before = snapshots_before(state)
    old = before[: max(0, len(before) - (keep - 1))]
    for path in old:
        files = sealed_files(path) or (path,)
        try:
            for file in (sums_path(path), *files):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(
                f"cannot remove the old snapshot {path}: {error.strerror}"
            ) from error
    return old


def _parts(name: str) -> tuple[str, int, str]:
    """Split `quick_iter_10.solverstate` into `quick`, 10 and `.solverstate`; ValueError for any
    other name.
    """
    match = re.fullmatch(r"(.*)_iter_(\d{1,18})(\.solverstate(?:\.h5)?|\.pt)", name)
    if match is None:
        raise ValueError(name)
    return match[1], int(match[2]), match[3]


LARGEST_RECORD_BYTES = 4096


class Prefixes:
    """The prefixes with which this process writes snapshots.

    Args:
        job: the id of its job; empty: it is one of its own.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._locks: dict[Path, int] = {}
        self._runs: dict[tuple[Path, str], Run] = {}
        weakref.finalize(self, _release, self._locks, os.getpid())

    def take(
        self,
        prefix: Path,
        ending: str,
        resumed: Path | None = None,
        on_earlier: Callable[[Path], object] = lambda _: None,
    ) -> Run:
        """Return the run to write snapshots for, after every other job was refused.

        Call it before each snapshot.

        Args:
            prefix: absolute.
            ending: of the states' names.
            on_earlier: called as the run begins, with the newest snapshot of another run with this
                prefix that it does not continue.

        Raises:
            SnapshotError: another job that runs writes with this prefix.
        """
        self._lock(prefix)
        key = prefix, ending
        if key not in self._runs:
            self._runs[key] = self._begin(prefix, ending, resumed, on_earlier)
        return self._runs[key]

    def release(self) -> None:
        """Leave all prefixes to other jobs; the next `take` takes its own again."""
        _release(self._locks, os.getpid())

    def _begin(
        self,
        prefix: Path,
        ending: str,
        resumed: Path | None,
        on_earlier: Callable[[Path], object],
    ) -> Run:
        if found := sealed(prefix, ending):
            newest, run = found[-1], run_of(found[-1])
            if (self._job and run.job == self._job) or _are_same(newest, resumed):
                return Run(number=run.number, job=self._job)
            on_earlier(newest)
        number = 1 + max((run.number for run in all_runs(prefix.parent)), default=0)
        return Run(number=number, job=self._job)

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
