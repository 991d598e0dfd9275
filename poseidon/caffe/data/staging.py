"""Atomic creation of several files and folders, by means of a staging folder beside them.

Law: the final names appear only when everything is complete, all or none. An interruption (an
error, Ctrl-C, kill -9) leaves at most a folder `.<name>.partial`, which the next run removes. Two
runs with the same target exclude each other.

The folder is locked with flock, which ends with its process. Before the first rename, the removals
and renames are written to a journal in the folder; a run that finds a journal in an unlocked folder
completes them. What is left may come from elsewhere, as data sets do, or from another user of the
machine: a folder of another user, a link, and a journal with paths are refused.

Progress reports of long operations.

Law: an operation calls a `Report`; only the command line draws a progress bar.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from poseidon.base.durable import write_whole
from poseidon.base.foreign_files import read_in
from poseidon.errors import DataError

LOCK = "lock"
JOURNAL = "complete.json"
LONGEST_JOURNAL_BYTES = 1 << 24
ATTEMPTS = 100
"""How often to create the folder, which a run that ends may remove each time."""


class Staging:
    """A locked staging folder, created by `staging`.

    Attributes:
        folder: the folder for the new files, which `publish` moves to its parent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, names: Sequence[str], *, remove: Sequence[str] = ()) -> None:
        """Move files and folders from `folder` to its parent.

        Args:
            names: the names to move, in this order. Existing files are replaced; existing folders
                are an error.
            remove: files and folders in the parent to remove first.
        """
        order = {"remove": list(remove), "move": list(names)}
        write_whole(self.folder / JOURNAL, json.dumps(order).encode())
        _finish(self.folder)


@contextmanager
def staging(target: Path) -> Iterator[Staging]:
    """Yield a staging folder for `target`; it is removed at the end, also after an error.

    Raises:
        DataError: another process creates the same target, the folder is not writable, or what is
            left of another run is not this user's.
    """
    folder = _folder_for(target)
    made = [parent for parent in folder.parents if not parent.exists()]
    lock = _lock(folder, target)
    try:
        if (folder / JOURNAL).exists():
            _finish(folder)
        _clear(folder)
        yield Staging(folder)
    finally:
        # A journal that still exists belongs to renames that failed midway. The next run completes
        # them.
        if not (folder / JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # not empty: it holds the result
                parent.rmdir()
        os.close(lock)


def _lock(folder: Path, target: Path) -> int:
    """Create the folder and lock it. Return the descriptor that holds the lock."""
    attempts = 0
    while True:
        attempts += 1
        try:
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                _check_left(folder)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempts < ATTEMPTS:
                continue
            raise DataError(
                f"{target} cannot be created: {folder.parent}: {error.strerror}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise DataError(
                f"{target} is being created by another process: wait for it, or stop it"
            ) from None
        if _is_same_file(descriptor, folder / LOCK):
            return descriptor
        os.close(descriptor)  # the locked file has been removed by its last holder


def _check_left(folder: Path) -> None:
    """Raise OSError where a folder that was there already is not one of this user's."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        why = f"{folder.name} is not a folder of this user; remove it"
        raise PermissionError(errno.EPERM, why, str(folder))


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _finish(folder: Path) -> None:
    """Complete the removals and moves of the journal, then remove it."""
    journal = folder / JOURNAL
    try:
        order = json.loads(read_in(folder.resolve(), JOURNAL, most_bytes=LONGEST_JOURNAL_BYTES))
        remove, move = order["remove"], order["move"]
        if not all(os.path.basename(name) == name not in ("", ".", "..") for name in remove + move):
            raise ValueError("a name is a path")
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise DataError(
            f"{journal} is not from this version of Poseidon, or is damaged: remove {folder}"
        ) from error
    # A name that has been moved already is the new file and must not be removed.
    moved = {name for name in move if not (folder / name).exists()}
    for name in remove:
        if name not in moved:
            _remove(folder.parent / name)
    for name in move:
        if name not in moved:
            (folder / name).replace(folder.parent / name)
    journal.unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name != LOCK:
            _remove(entry)


def recover(target: Path) -> None:
    """Complete or remove what an interrupted creation of `target` has left.

    Raises:
        DataError: the other run is still active.
    """
    if _folder_for(target).exists():
        with staging(target):
            pass


def _folder_for(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


# Called with the activity, the amount done, and the total.
Report = Callable[[str, int, int], object]

DOWNLOADING = "downloading"
CHECKING = "reading what is to be copied"
COPYING = "copying"
TESTING = "testing"
TIMING = "timing"
EXTRACTING = "extracting"
UNITS = {
    DOWNLOADING: "B",
    CHECKING: "B",
    COPYING: "B",
    TESTING: "batch",
    TIMING: "it",
    EXTRACTING: "batch",
}
"""The unit of each activity that does not count records; B: bytes."""


def silent(activity: str, done: int, total: int) -> None:
    """Ignore a progress report."""
