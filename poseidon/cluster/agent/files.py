"""The files of a host, as its agent serves them to the launcher.

A file that arrives is written in parts to `.<name>.arriving`, in the folder where it will be.

Law: a file gets its name when it is complete and its SHA-256 equals the request's. A file that is
there and differs is reported, and removed only on request.

The folder of an agent in the host's folder for temporary files.

Law: an agent removes its folder when it ends. If it was killed, the next agent of this user removes
the folder. No other folder is removed: an agent locks a file in its folder while it lives, and a
folder without that file is not an agent's. The file has the host's name, because hosts that share a
file system may not share its locks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from poseidon.base.settings import expanded, folder_of_sockets
from poseidon.cluster.agent.messages import Content, Put, ReadFile

LARGEST_PART = 8 << 20
ARRIVING = ".%s.arriving"
# Files that databases keep while they are open.
TRANSIENT = ("lock.mdb", "LOCK", "LOG", "LOG.old")


def put(part: Put) -> None:
    """Write a part of a file.

    Raises:
        OSError: as the system raises it.
    """
    with open(expanded(part.path), "wb" if part.offset == 0 else "r+b") as stream:
        stream.seek(part.offset)
        stream.write(part.content)


def get(part: ReadFile) -> Content:
    """Read a part of a file.

    Raises:
        OSError: as the system raises it, or it is not a regular file.
    """
    # Not blocking: a pipe of this name would wait for its writer.
    descriptor = os.open(expanded(part.path), os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{part.path} is not a regular file")
        stream.seek(part.offset)
        content = stream.read(max(0, min(part.size, LARGEST_PART)))
    return Content(id=part.id, size=status.st_size, content=content)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a request.

    Args:
        request: `do` is `inspect` or `seal`; `files` lists `path`, `size` and `sha256` of each;
            `folders` those that hold nothing but these files; `replace` whether to remove files
            that differ.

    Returns:
        `problem`, a sentence; or, to `inspect`, `files` with `path`, `state` and `arrived` bytes
        with their `sha256` of each, and `free` bytes; or, to `seal`, `bad`, the numbers of files
        with a wrong checksum.
    """
    try:
        if request["do"] == "seal":
            return {
                "bad": [number for number, file in enumerate(request["files"]) if not _seal(file)]
            }
        return _inspect(request)
    except OSError as error:
        return {"problem": f"{error.filename or 'a file'}: {error.strerror or error}"}


def _inspect(request: Mapping[str, Any]) -> dict[str, Any]:
    files = [dict(file, path=os.path.abspath(expanded(file["path"]))) for file in request["files"]]
    others = _other_files(request["folders"], {file["path"] for file in files})
    states = [_state(file) for file in files]
    others += [file["path"] for file, state in zip(files, states, strict=True) if state == "other"]
    if others and not request["replace"]:
        return {"problem": f"{others[0]} is there already and differs; --replace overwrites it"}
    for path in others:
        _remove(path)
    found = []
    for file, state in zip(files, states, strict=True):
        os.makedirs(os.path.dirname(file["path"]), exist_ok=True)
        arriving = arriving_path(file["path"])
        arrived = os.path.getsize(arriving) if os.path.isfile(arriving) and state != "same" else 0
        if arrived > file["size"]:
            os.remove(arriving)
            arrived = 0
        found.append(
            {
                "path": file["path"],
                "state": "same" if state == "same" else "missing",
                "arrived": arrived,
                "sha256": digest(arriving)[0] if arrived else "",
            }
        )
    return {"files": found, "free": _free_bytes(files)}


def _state(file: dict[str, Any]) -> str:
    path = file["path"]
    if not os.path.lexists(path):
        return "missing"
    same = (
        os.path.isfile(path)
        and os.path.getsize(path) == file["size"]
        and digest(path)[0] == file["sha256"]
    )
    return "same" if same else "other"


def _other_files(folders: list[str], expected: set[str]) -> list[str]:
    """List the other files in folders that are to hold the expected files only."""
    found = []
    for folder in folders:
        folder = os.path.abspath(expanded(folder))
        if os.path.lexists(folder) and not os.path.isdir(folder):
            found.append(folder)
        for place, _, names in os.walk(folder):
            paths = [os.path.join(place, name) for name in names if name not in TRANSIENT]
            found += [
                path for path in paths if path not in expected and not path.endswith(".arriving")
            ]
    return sorted(found)


def _seal(file: dict[str, Any]) -> bool:
    """Give a file its name; return False where its checksum is wrong, and remove it then."""
    arriving = arriving_path(file["path"])
    if not os.path.exists(arriving) and _state(file) == "same":
        return True  # sealed by a request whose answer was lost
    if os.path.getsize(arriving) != file["size"] or digest(arriving)[0] != file["sha256"]:
        os.remove(arriving)
        return False
    with open(arriving, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(arriving, file["path"])
    return True


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def _free_bytes(files: list[dict[str, Any]]) -> int:
    places = {os.path.dirname(file["path"]) for file in files}
    return min((shutil.disk_usage(place).free for place in places), default=0)


def arriving_path(path: str) -> str:
    """Return the path of a file until it is complete."""
    folder, name = os.path.split(path)
    return os.path.join(folder, ARRIVING % name)


def digest(
    path: str | Path, most: int = sys.maxsize, report: Callable[[int], object] = lambda _: None
) -> tuple[str, int]:
    """Return the SHA-256 of a file, in hexadecimal digits, and the number of bytes read.

    Args:
        path: the file.
        most: bytes that are read, from its beginning.
        report: called with the number of bytes that were read since the last call.
    """
    state, size = hashlib.sha256(), 0
    with open(path, "rb") as stream:
        while block := stream.read(min(most - size, 1 << 20)):
            state.update(block)
            size += len(block)
            report(len(block))
    return state.hexdigest(), size


PREFIX = "poseidon-"
MARK = f".agent-{socket.gethostname()}"


class AgentFolder:
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
