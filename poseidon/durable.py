"""Files that are written: whether a folder can take them, and their atomic and durable replacement:
after a power failure the file is complete or absent.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def replace_durably(partial: Path, path: Path) -> None:
    """Flush a file to disk, rename it, and flush its new name as well.

    Args:
        partial: the complete file under a temporary name, on the same file system.
        path: its final name; an earlier file of that name is replaced.

    Raises:
        OSError: the disk is full, or the folder is not writable; an earlier file is unchanged.
    """
    flush(partial)
    partial.replace(path)
    with suppress(OSError):  # not every file system can flush a folder
        flush(path.parent)


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk.

    Raises:
        OSError: the disk is full, or broken.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def obstacle_to(folder: Path) -> str | None:
    """Return the reason why files cannot be written to a folder, which need not exist yet; None
    if they can.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} may not be written by this user"
    disk = shutil.disk_usage(existing)
    if disk.total and not disk.free:  # some file systems of a network report neither
        return f"the disk of {existing} is full"
    return None
