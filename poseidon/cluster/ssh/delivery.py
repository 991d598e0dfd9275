"""Copying files to a host over SFTP; an interrupted copy is resumed.

Law: a file gets its name on the host only when its SHA-256 there equals ours (`receiving.py`). The
partial file of an interrupted copy is compared and continued; a file that is there already is not
sent again; one that differs is refused, unless it is to be replaced. Files get their names in the
order in which they are given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import paramiko

from poseidon.cluster.python_command import sent_program_arguments
from poseidon.cluster.ssh import receiving
from poseidon.cluster.ssh.receiving import arriving_path
from poseidon.errors import JobError, printable

# Files in one request: bounds the request and what is lost with a dead host.
FILES_PER_REQUEST = 2000
BLOCK_BYTES = 1 << 18
# A host that computes checksums slower than this is taken for dead.
MIN_DIGEST_BYTES_S = 10e6
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFile:
    """A file to be delivered.

    Attributes:
        local: its path on this machine.
        remote: its path on the host; `~/` stands for the user's home.
        size: in bytes.
        sha256: in hexadecimal digits.
    """

    local: Path
    remote: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The result of a delivery.

    Attributes:
        files: their number.
        sent_files: how many of them were sent, in whole or in part.
        sent_bytes: over the network.
    """

    files: int
    sent_files: int
    sent_bytes: int


class Finished(Protocol):
    """The result of a command on a host."""

    @property
    def status(self) -> int:
        """Its exit status."""

    @property
    def stdout(self) -> bytes:
        """Its output."""

    @property
    def stderr(self) -> bytes:
        """Its standard error."""


class RemoteFile(Protocol):
    """An open file of an SFTP session."""

    def write(self, data: bytes) -> object:
        """Append bytes."""

    def close(self) -> None:
        """Close the file; all bytes have arrived when this returns."""


class Sftp(Protocol):
    """The part of an SFTP session that a delivery uses."""

    def open(self, filename: str, mode: str) -> Any:
        """Open a file; see `RemoteFile`."""

    def close(self) -> None:
        """End the session."""


class SftpConnection(Protocol):
    """A connection that files can be delivered over:
    `poseidon.cluster.ssh.connections.SshConnection`.
    """

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program on the host to its end."""

    def sftp(self) -> Any:
        """Open an SFTP session; see `Sftp`."""


def sent_file(
    local: Path, remote: str, report: Callable[[int], object] = lambda _: None
) -> SentFile:
    """Compute the checksum of a file to be delivered.

    Args:
        local: its path on this machine.
        remote: its path on the host.
        report: called with the number of bytes that were read since the last call.

    Raises:
        JobError: it cannot be read.
    """
    state, size = hashlib.sha256(), 0
    try:
        with local.open("rb") as stream:
            while block := stream.read(1 << 20):
                state.update(block)
                size += len(block)
                report(len(block))
    except OSError as error:
        raise JobError(f"cannot read {local}, which is to be copied: {error.strerror}") from error
    return SentFile(local=local, remote=remote, size=size, sha256=state.hexdigest())


def deliver(
    files: Sequence[SentFile],
    connection: SftpConnection,
    *,
    name: str,
    python: Sequence[str],
    folders: Sequence[str] = (),
    replace: bool = False,
    report: Callable[[int], object] = lambda _: None,
) -> Delivered:
    """Copy files to a host.

    Args:
        files: in the order in which they get their names; the file that makes the others usable
            comes last.
        connection: to the host.
        name: the host in messages: `client 1 (node1)`.
        python: the argv that starts its interpreter, 3.10 or newer; no package need be installed
            for it.
        folders: folders on the host that are to hold nothing but these files.
        replace: whether to replace files that are there and differ.
        report: called with the number of further bytes that are on the host, sent or found.

    Raises:
        JobError: other files are there, the disk is too full, the connection broke, or a checksum
            was wrong twice. A second call continues where the first ended.
    """
    delivery = _Delivery(connection, name, python, report)
    try:
        return delivery.run(files, folders, replace=replace)
    except (OSError, EOFError, paramiko.SSHException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise JobError(
            f"{name}: copying broke off after {delivery.sent_bytes} bytes ({why}); run the same "
            "command again to continue"
        ) from error


class _Delivery:
    """One delivery to one host."""

    def __init__(
        self,
        connection: SftpConnection,
        name: str,
        python: Sequence[str],
        report: Callable[[int], object],
    ) -> None:
        self._connection = connection
        self._name = name
        self._python = tuple(python)
        self._report = report
        self.sent_bytes = 0
        self.sent_files = 0

    def run(self, files: Sequence[SentFile], folders: Sequence[str], *, replace: bool) -> Delivered:
        """Inspect everything first, so that a full disk or another file there is found before a
        byte is sent.
        """
        requests = [
            files[at : at + FILES_PER_REQUEST] for at in range(0, len(files), FILES_PER_REQUEST)
        ]
        # Only a single request can check that a folder holds nothing else; larger trees are not
        # delivered.
        folders = folders if len(requests) == 1 else ()
        found = [self._inspect(request, folders, replace=replace) for request in requests]
        self._check_space(found)
        for request, places in zip(requests, found, strict=True):
            missing = [pair for pair in zip(request, places.files, strict=True) if not pair[1].same]
            self._report(
                sum(
                    file.size
                    for file, place in zip(request, places.files, strict=True)
                    if place.same
                )
            )
            if missing:
                self._send_and_seal(missing)
        return Delivered(files=len(files), sent_files=self.sent_files, sent_bytes=self.sent_bytes)

    def _inspect(
        self, files: Sequence[SentFile], folders: Sequence[str], *, replace: bool
    ) -> _Found:
        known = self._request(
            files,
            {
                "do": "inspect",
                "folders": list(folders),
                "replace": replace,
                "files": _file_fields(files),
            },
        )
        places = tuple(
            _FileState(
                path=str(entry["path"]),
                same=entry["state"] == "same",
                arrived=_resumable_bytes(file, int(entry["arrived"]), str(entry["sha256"])),
            )
            for file, entry in zip(files, known["files"], strict=True)
        )
        needed = sum(
            file.size - place.arrived
            for file, place in zip(files, places, strict=True)
            if not place.same
        )
        return _Found(files=places, needed_bytes=needed, free_bytes=int(known["free"]))

    def _check_space(self, found: Sequence[_Found]) -> None:
        needed, free = (
            sum(each.needed_bytes for each in found),
            min(each.free_bytes for each in found),
        )
        if needed > free:
            raise JobError(
                f"{self._name}: {needed / 1e6:.0f} MB are still to be copied and its disk has "
                f"room for {free / 1e6:.0f}"
            )

    def _send_and_seal(self, missing: Sequence[tuple[SentFile, _FileState]]) -> None:
        """Send the files; send those with a wrong checksum once more."""
        with contextlib.closing(self._connection.sftp()) as session:
            for attempt in range(2):
                for file, place in missing:
                    self._send(session, file, place.path, place.arrived if attempt == 0 else 0)
                files = [file for file, _ in missing]
                fields = [
                    {"path": place.path, "size": file.size, "sha256": file.sha256}
                    for file, place in missing
                ]
                bad = self._request(files, {"do": "seal", "files": fields})["bad"]
                missing = [missing[number] for number in bad]
                if not missing:
                    return
        raise JobError(
            f"{self._name}: {missing[0][1].path} has another checksum there than here, twice over; "
            "did it change here while it was copied?"
        )

    def _send(self, session: Sftp, file: SentFile, path: str, begin: int) -> None:
        self._report(begin)
        self.sent_files += 1
        with file.local.open("rb") as source:
            source.seek(begin)
            target = session.open(arriving_path(path), "ab" if begin else "wb")
            with contextlib.closing(target):
                if hasattr(target, "set_pipelined"):
                    target.set_pipelined(
                        True
                    )  # without it each block waits for the answer to the one before
                for block in _blocks(source):
                    target.write(block)
                    self.sent_bytes += len(block)
                    self._report(len(block))

    def _request(self, files: Sequence[SentFile], request: dict[str, Any]) -> dict[str, Any]:
        timeout_s = ANSWER_S + 2 * sum(file.size for file in files) / MIN_DIGEST_BYTES_S
        program = Path(receiving.__file__).read_bytes()
        stdin = b"%d\n%b%b" % (len(program), program, json.dumps(request).encode())
        finished = self._connection.run(
            [*self._python, *sent_program_arguments()], stdin=stdin, timeout_s=timeout_s
        )
        try:
            answer = json.loads(finished.stdout)
        except ValueError as error:
            last = finished.stderr.decode("utf-8", "backslashreplace").strip().splitlines()[
                -1:
            ] or ["no output"]
            raise JobError(
                f"{self._name}: Python there cannot receive the files (status {finished.status}): "
                f"{printable(last[0])}"
            ) from error
        if "problem" in answer:
            raise JobError(f"{self._name}: {printable(str(answer['problem']))}")
        return dict(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileState:
    """The state of a file on the host: complete, or its first `arrived` bytes."""

    path: str
    same: bool
    arrived: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The host's answer to one inspection."""

    files: tuple[_FileState, ...]
    needed_bytes: int
    free_bytes: int


def _file_fields(files: Sequence[SentFile]) -> list[dict[str, object]]:
    return [{"path": file.remote, "size": file.size, "sha256": file.sha256} for file in files]


def _resumable_bytes(file: SentFile, arrived: int, sha256: str) -> int:
    """Return how many of the bytes that have arrived belong to the file: all or none."""
    if not 0 < arrived <= file.size:
        return 0
    state, left = hashlib.sha256(), arrived
    with file.local.open("rb") as stream:
        while left and (block := stream.read(min(left, 1 << 20))):
            state.update(block)
            left -= len(block)
    return arrived if not left and state.hexdigest() == sha256 else 0


def _blocks(source: IO[bytes]) -> Iterator[bytes]:
    while block := source.read(BLOCK_BYTES):
        yield block
