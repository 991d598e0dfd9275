"""A private folder beside the place where something is to appear, so that nothing half-made ever does.

Law: final names appear only when everything is complete, all or none. Whatever interrupts the work (an error, Ctrl-C,
kill -9) leaves at most a folder `.<name>.partial`, which the next run clears away. Two runs of the same work
exclude each other.

How: the folder is locked with flock, which dies with its process. Before the first rename, the order of removals and
renames is written to a journal in the folder; a run that finds a journal with nobody holding the lock carries it out.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from poseidon.errors import DataError

LOCK = "lock"
JOURNAL = "complete.json"


class Staging:
    """A locked private folder; made by `staging`.

    Attributes:
        folder: write here what `publish` is to move beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, names: Sequence[str], *, remove: Sequence[str] = ()) -> None:
        """Move files and folders of these names out of `folder`, to lie beside it.

        Args:
            names: in the order of the moves. Files of the same name are replaced; folders must not exist there.
            remove: files and folders beside `folder` that go first.
        """
        journal = self.folder / JOURNAL
        temporary = self.folder / f"{JOURNAL}.new"
        order = {"remove": list(remove), "move": list(names)}
        temporary.write_text(json.dumps(order), encoding="utf-8")
        temporary.replace(journal)
        _finish(self.folder)


@contextmanager
def staging(target: Path) -> Iterator[Staging]:
    """Yield a staging folder for work on `target`, removed at the end, also when the work fails.

    Raises:
        DataError: another process is at the same work, or the place cannot be written.
    """
    folder = _folder_for(target)
    made_parent = not folder.parent.exists()
    lock = _lock(folder, target)
    try:
        if (folder / JOURNAL).exists():
            _finish(folder)
        _clear(folder)
        yield Staging(folder)
    finally:
        # A journal that is still here belongs to renames that failed midway: left for the next run to finish.
        if not (folder / JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)
        if made_parent:
            with suppress(OSError):  # it holds what was made
                folder.parent.rmdir()
        os.close(lock)


def _lock(folder: Path, target: Path) -> int:
    """Make the folder and take its lock; returns the descriptor that holds it."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # the run before us has just removed the folder
        except OSError as error:
            raise DataError(f"{target} cannot be made: {folder.parent}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise DataError(f"{target} is being made by another process: wait for it, or end it") from None
        if _is_same_file(descriptor, folder / LOCK):
            return descriptor
        os.close(descriptor)  # locked a file that its last holder has removed


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _finish(folder: Path) -> None:
    """Do what the journal says and has not been done, then forget it."""
    journal = folder / JOURNAL
    order = json.loads(journal.read_text(encoding="utf-8"))
    # What has been moved already is the new thing, not the one to be removed.
    moved = {name for name in order["move"] if not (folder / name).exists()}
    for name in order["remove"]:
        if name not in moved:
            _remove(folder.parent / name)
    for name in order["move"]:
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
    """Finish or clear away what an earlier run of the work on `target` left, if anything.

    Raises:
        DataError: that run is still at it.
    """
    if _folder_for(target).exists():
        with staging(target):
            pass


def _folder_for(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")
