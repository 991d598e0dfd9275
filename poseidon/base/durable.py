"""Writes files: one way for all of them, and a check whether a folder can take them.

Law: the kind of a file does not change. A regular file is replaced as a whole: after an error
or a power failure it is the earlier file or the complete new one. It keeps its mode, and its owner
where that is permitted. A link stays, and its target is replaced or created. A device, a FIFO or a
descriptor of this process (`/dev/stdout`, `/dev/fd/N`) gets the content itself. A file that cannot
be replaced because of its folder, such as one that is mounted into a container, is written in
place.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_DESCRIPTORS = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd")
_MOST_LINKS = 40
"""As the kernel follows."""
_NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_RENAME = (errno.EACCES, errno.EPERM, errno.EBUSY)
"""Errors of a folder whose file may take the content nevertheless. EBUSY: a mount point."""
_LONGEST_NAME_BYTES = 200
"""Of the final name in the temporary one, which has at most 255."""


def write_whole(path: Path, content: bytes, *, durably: bool = True) -> None:
    """Write a file; see `replacing`.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path, durably=durably) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, durably: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing. A regular file has the new content when the block has ended, and
    the earlier one if it has raised.

    Args:
        path: its name; see the module for what may stand there.
        durably: flush it to disk, so that it also survives a power failure. False for a file that
            is soon written anew.

    Raises:
        OSError: it cannot be written, also at the end of the block: the folder is missing or not
            writable, or the disk is full. A file that is written in place (see the module) is then
            incomplete.
    """
    target = _followed(path)
    if isinstance(target, int):
        _print_what_waits()
        with os.fdopen(target, "wb") as file:
            yield file
        return
    status = _status(target)
    if status is not None and not stat.S_ISREG(status.st_mode):
        with target.open("wb") as file:
            yield file
        return
    try:
        partial, stream = _open_partial(target, status)
    except OSError as error:
        if status is None or error.errno not in _NO_NEW_FILE:
            raise
        with target.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        return
    try:
        with stream:
            yield stream
            stream.flush()
            _replace(partial, target, durably=durably)
    except BaseException:
        with suppress(OSError):  # a read-only file system raises even if the file does not exist
            partial.unlink(missing_ok=True)
        raise


def replace_durably(partial: Path, path: Path) -> None:
    """Flush a complete file to disk, put it where `path` is, and flush its new name as well.

    Args:
        partial: the file under a temporary name, which is gone at the end.
        path: its final name; see the module for what may stand there.

    Raises:
        OSError: the disk is full, or the folder is not writable; an earlier file is unchanged.
    """
    _replace(partial, path, durably=True)


def _replace(partial: Path, path: Path, *, durably: bool) -> None:
    target = _followed(path)
    status = None if isinstance(target, int) else _status(target)
    if isinstance(target, int) or (status is not None and not stat.S_ISREG(status.st_mode)):
        _move_into(partial, target)
        return
    if durably:
        flush(partial)
    if status is not None:
        _keep_owner(partial, status)
    try:
        os.replace(partial, target)
    except OSError as error:
        if error.errno == errno.EXDEV:  # the link leads to another file system
            with partial.open("rb") as source, replacing(target) as file:
                shutil.copyfileobj(source, file)
            partial.unlink()
        elif status is not None and error.errno in _NO_RENAME:
            _move_into(partial, target)
            flush(target)
        else:
            raise
    if durably:
        with suppress(OSError):  # not every file system can flush a folder
            flush(target.parent)


def is_standard_output(path: Path) -> bool:
    """Tell whether a file that is written is what this process prints to, as `/dev/stdout` is:
    what is said about the file then goes to standard error.
    """
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _move_into(partial: Path, target: Path | int) -> None:
    """Write a complete file into what stands there, and remove it."""
    _print_what_waits()
    with partial.open("rb") as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file)
    partial.unlink()


def _followed(path: Path) -> Path | int:
    """Follow the links of a name; return where they lead, or a copy of the descriptor of this
    process that it stands for.

    A descriptor is copied, because `/dev/stdout` opened by its name begins anew at the start of a
    file that may have content, and a socket cannot be opened so at all.
    """
    for _ in range(_MOST_LINKS):
        folder = Path(os.path.realpath(path.parent))
        path = folder / path.name if path.name else folder
        found = _DESCRIPTORS.fullmatch(str(folder))
        if found and path.name.isdecimal():
            return os.dup(int(path.name)) if int(found[1]) == os.getpid() else path
        if not path.is_symlink():
            return path
        _refuse_planted(path, folder)
        path = folder / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _refuse_planted(link: Path, folder: Path) -> None:
    """Refuse a link that another user may have put into a folder such as /tmp: it could lead to
    any file of this user. The kernel does the same (fs.protected_symlinks).
    """
    status, above = link.lstat(), folder.stat()
    if above.st_mode & stat.S_IWOTH and status.st_uid not in (os.geteuid(), above.st_uid):
        raise PermissionError(errno.EACCES, "it is a link of another user", str(link))


def _status(target: Path) -> os.stat_result | None:
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    return status


def _print_what_waits() -> None:
    """Print what is printed already and waits, so that the content comes after it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()


def _open_partial(target: Path, status: os.stat_result | None) -> tuple[Path, BinaryIO]:
    """Make the temporary file beside a file. It is locked while it is written; one that is not
    locked is from a process that was killed, and is removed.
    """
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME_BYTES])
    for left in target.parent.glob(f".{glob.escape(name)}.*.partial"):
        _remove_unlocked(left)
    mode = 0o666 if status is None else (stat.S_IMODE(status.st_mode) & 0o777) | 0o600
    while True:
        partial = target.with_name(f".{name}.{secrets.token_hex(4)}.partial")
        # Exclusive: in a folder that others may write to, the name could be a link of theirs.
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return partial, os.fdopen(number, "wb")
        os.close(number)  # removed by another process before it was locked


def _remove_unlocked(left: Path) -> None:
    with suppress(OSError):
        number = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink(missing_ok=True)
        finally:
            os.close(number)


def _keep_owner(partial: Path, status: os.stat_result) -> None:
    """Give a file the owner, where that is permitted, and the mode of the file that it replaces."""
    mode = stat.S_IMODE(status.st_mode)
    for uid, gid in ((status.st_uid, status.st_gid), (-1, status.st_gid)):
        with suppress(OSError):
            os.chown(partial, uid, gid)
            break
    made = partial.stat()
    if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
        mode &= 0o777  # a program with the rights of its owner was another owner's
    with suppress(OSError):  # a file system without modes
        partial.chmod(mode)


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
        return f"this user may not write to {existing}"
    disk = shutil.disk_usage(existing)
    if disk.total and not disk.free:  # some file systems of a network report neither
        return f"the disk of {existing} is full"
    return None
