"""The folder of an agent in the host's folder for temporary files.

Law: an agent removes its folder when it ends. If it was killed, the next agent of this user removes
the folder. No other folder is removed: an agent locks a file in its folder while it lives, and a
folder without that file is not an agent's. The file has the host's name, because hosts that share a
file system may not share its locks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from poseidon.base.settings import folder_of_sockets

PREFIX = "poseidon-"
MARK = f".agent-{socket.gethostname()}"


class Scratch:
    """The folder of one agent; only this user can enter it.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        _remove_left()
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=folder_of_sockets())
        # the mark has its name only once it is locked
        new = Path(self.path, f"{MARK}.new")
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        with suppress(OSError):  # where a file system has no locks, nobody can take this one
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(Path(self.path, MARK))

    def clear(self) -> None:
        """Remove what is in it."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != MARK:
                os.unlink(entry.path)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_left() -> None:
    """Remove the folders of this user's agents that were killed."""
    for mark in Path(folder_of_sockets()).glob(f"{PREFIX}*/{MARK}"):
        with suppress(OSError):  # its agent lives, or it is another user's
            lock = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(mark.parent, ignore_errors=True)
            finally:
                os.close(lock)
