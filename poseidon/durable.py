"""Giving a written file its name, so that a power failure finds the file under that name whole, or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def put_in_place(partial: Path, path: Path) -> None:
    """Flush a file to disk, rename it, and flush its new name as well.

    Args:
        partial: the file under another name, on the same file system; nobody writes to it any more.
        path: its name; an earlier file of that name is replaced.

    Raises:
        OSError: the disk is full, or a folder may not be written; an earlier file is as it was.
    """
    flush(partial)
    partial.replace(path)
    with suppress(OSError):  # not every file system can flush what is in a folder
        flush(path.parent)


def flush(path: Path) -> None:
    """Bring to disk what was written to a file, or what the files in a folder are called.

    Raises:
        OSError: the disk is full, or broken.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
