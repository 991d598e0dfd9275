"""Atomic and durable file replacement: after a power failure the file is complete or absent."""

from __future__ import annotations

import os
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
