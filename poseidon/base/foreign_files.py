"""Files in folders that another user may have written, such as the output folders of jobs;
folders that only this user may write; and definitions, which may be anything that has a name.

Law: below the folder no link is followed, so that nobody gets to see through a page or a listing
what the user who makes it may read. A file is a regular one of the folder's owner; what is not is
refused without reading it, and without waiting for it, as a FIFO would make one wait.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path, PurePath
from typing import BinaryIO

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FLAGS_OF_NAMED = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
PRIVATE = 0o700
LARGEST_DEFINITION = 256 << 20
PIPE_SILENT_S = 60.0
_PIECE_BYTES = 1 << 20
_ROOT = 0


def open_in(folder: Path, name: str | PurePath, *, most_bytes: int | None = None) -> BinaryIO:
    """Open a file below a folder for reading.

    Args:
        folder: its real path (`Path.resolve`).
        name: relative to the folder.
        most_bytes: a larger file is refused; None: the caller reads a part of it.

    Raises:
        OSError: there is no such file, or it is refused; `strerror` has the reason.
    """
    parts = PurePath(name).parts
    if not parts or ".." in parts or PurePath(name).is_absolute():
        raise _refusal(errno.EINVAL, "it is not below the folder", folder / name)
    try:
        number = os.open(folder, _FLAGS | os.O_DIRECTORY)
    except OSError as error:
        raise _explained(error, folder) from error
    try:
        owner = os.fstat(number).st_uid
        for position, part in enumerate(parts):
            last = position == len(parts) - 1
            flags = _FLAGS if last else _FLAGS | os.O_DIRECTORY
            try:
                inner = os.open(part, flags, dir_fd=number)
            except OSError as error:
                raise _explained(error, folder / name) from error
            os.close(number)
            number = inner
            _check(os.fstat(number), owner, last, most_bytes, folder / name)
        file = os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise
    return file


def read_in(folder: Path, name: str | PurePath, *, most_bytes: int) -> bytes:
    """Read a file below a folder; see `open_in`.

    Raises:
        OSError: it cannot be read, or is refused; `strerror` has the reason.
    """
    with open_in(folder, name, most_bytes=most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it has grown
        raise _refusal(errno.EFBIG, _too_large(most_bytes), folder / name)
    return content


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. It does not wait for a pipe's writer.

    Raises:
        OSError: it cannot be read, or is of another kind; `strerror` has the reason.
    """
    number = os.open(path, _FLAGS_OF_NAMED)
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    if stat.S_ISDIR(mode):
        raise _refusal(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise _refusal(errno.EINVAL, "it is not a regular file", path)


def read_definition(path: Path, *, most_bytes: int = LARGEST_DEFINITION) -> bytes:
    """Read a file that a user names and that people write: a net, a solver, a machinefile.

    It is a regular file, or a pipe, as shells make one of `<(command)`. A pipe must end, and may be
    silent for at most `PIPE_SILENT_S` seconds.

    Raises:
        OSError: it cannot be read, is of another kind, or is too large; `strerror` has the reason.
    """
    number = os.open(path, _FLAGS_OF_NAMED)
    with os.fdopen(number, "rb", buffering=0) as file:
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        is_pipe = stat.S_ISFIFO(status.st_mode)
        if not is_pipe and not stat.S_ISREG(status.st_mode):
            raise _refusal(errno.EINVAL, "it is a device, not a file or a pipe", path)
        if 0 < status.st_size <= most_bytes and not is_pipe:  # in one piece, without a copy
            return file.readall()
        content = bytearray()
        while len(content) <= most_bytes:
            if is_pipe and not select.select([file], [], [], PIPE_SILENT_S)[0]:
                reason = f"nothing was written to the pipe for {PIPE_SILENT_S:g} s"
                raise _refusal(errno.ETIMEDOUT, reason, path)
            piece = file.read(_PIECE_BYTES)
            if piece == b"":
                return bytes(content)
            content += piece or b""  # None: another reader has taken what was there
    raise _refusal(errno.EFBIG, _too_large(most_bytes), path)


def read_end(folder: Path, name: str | PurePath, *, most_bytes: int) -> bytes:
    """Read the last bytes of a file below a folder; see `open_in`. They begin with a whole line.

    Raises:
        OSError: it cannot be read, or is refused; `strerror` has the reason.
    """
    with open_in(folder, name) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most_bytes)
        file.seek(start)
        content = file.read(most_bytes)
    return content.partition(b"\n")[2] if start else content


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter, and those above that are missing, whatever the
    umask. One that is there is checked; see `check_private`.

    Raises:
        OSError: it cannot be made, or is not this user's; `strerror` has the reason.
    """
    if not folder.parent.exists():
        make_private(folder.parent)
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:
        check_private(folder)


def check_private(folder: Path) -> None:
    """Make sure that no other user may replace or remove what this user has in a folder. One of
    this user's that others may write to is closed to them, but not one with the sticky bit, such as
    `/tmp`, where others can only add files of their own.

    Raises:
        OSError: it is not there, or another user's; `strerror` has the reason.
    """
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(number)
        if status.st_uid not in (os.geteuid(), _ROOT):
            raise _refusal(errno.EPERM, "it belongs to another user", folder)
        if status.st_mode & _FOR_OTHERS and not status.st_mode & stat.S_ISVTX:
            if status.st_uid != os.geteuid():
                raise _refusal(errno.EPERM, "other users may write to it", folder)
            os.fchmod(number, stat.S_IMODE(status.st_mode) & ~_FOR_OTHERS)
    finally:
        os.close(number)


def _check(
    status: os.stat_result, owner: int, last: bool, most_bytes: int | None, path: Path
) -> None:
    if last and not stat.S_ISREG(status.st_mode):
        raise _refusal(errno.EINVAL, "it is not a regular file", path)
    if status.st_uid != owner:
        raise _refusal(errno.EPERM, "it belongs to a different user than its folder", path)
    if last and most_bytes is not None and status.st_size > most_bytes:
        raise _refusal(errno.EFBIG, _too_large(most_bytes), path)


def _explained(error: OSError, path: Path) -> OSError:
    """Return the error with a reason for what O_NOFOLLOW and O_NONBLOCK refuse."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return _refusal(errno.ELOOP, "it is a link, or below one", path)
    if error.errno == errno.ENXIO:  # a socket
        return _refusal(errno.EINVAL, "it is not a regular file", path)
    return OSError(error.errno, error.strerror, str(path))


def _too_large(most_bytes: int) -> str:
    return f"it has more than {most_bytes >> 20} MiB"


def _refusal(number: int, reason: str, path: Path) -> OSError:
    return OSError(number, reason, str(path))
