"""Copying files to another host over SFTP, so that a broken line costs nothing that has arrived.

Law: a file has its name on the host only when its SHA-256 there is the one here (`receiving.py`). What has arrived of one
that broke off is compared and gone on from; what is there already is not sent again; what is there and differs is refused,
unless it is to be replaced. Files get their names in the order in which they are given.
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

from poseidon.cluster.ssh import receiving
from poseidon.cluster.ssh.receiving import arriving_path
from poseidon.errors import JobError, printable

# Files in one order: so that neither the order nor what is lost with a dead host grows without bound.
FILES_PER_ORDER = 2000
BLOCK_BYTES = 1 << 18
# A host that reads files slower than this, for their checksums, does not answer any more.
SLOWEST_DIGEST_BYTES_S = 10e6
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFile:
    """A file to be delivered.

    Attributes:
        local: where it is here.
        remote: its path on the host; `~/` stands for the user's home.
        size: its bytes.
        sha256: of these, in hexadecimal digits.
    """

    local: Path
    remote: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What a delivery came to.

    Attributes:
        files: how many there are.
        sent_files: how many of them were sent, in whole or in part.
        sent_bytes: that went over the line.
    """

    files: int
    sent_files: int
    sent_bytes: int


class Finished(Protocol):
    """How a command on a host ended."""

    @property
    def status(self) -> int:
        """Its exit status."""

    @property
    def stdout(self) -> bytes:
        """What it wrote."""

    @property
    def stderr(self) -> bytes:
        """What it complained of."""


class RemoteFile(Protocol):
    """An open file of an SFTP session."""

    def write(self, data: bytes) -> object:
        """Append bytes."""

    def close(self) -> None:
        """All bytes are there when this returns."""


class Sftp(Protocol):
    """The part of an SFTP session that a delivery uses."""

    def open(self, filename: str, mode: str) -> Any:
        """Open a file; see `RemoteFile`."""

    def close(self) -> None:
        """End the session."""


class ReceivingHost(Protocol):
    """A host that files can be delivered to: `poseidon.cluster.ssh.connections.SshHost`."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program there to its end."""

    def sftp(self) -> Any:
        """Open an SFTP session; see `Sftp`."""


def sent_file(local: Path, remote: str, report: Callable[[int], object] = lambda _: None) -> SentFile:
    """A file with its checksum.

    Args:
        local: where it is here.
        remote: its path on the host.
        report: told how many more bytes were read.

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
    host: ReceivingHost,
    *,
    name: str,
    python: Sequence[str],
    folders: Sequence[str] = (),
    replace: bool = False,
    report: Callable[[int], object] = lambda _: None,
) -> Delivered:
    """Bring files to a host.

    Args:
        files: in the order in which they get their names; what makes the others usable comes last.
        host: where to.
        name: the host's, for messages: `client 1 (node1)`.
        python: the words that start its interpreter, 3.10 or newer; nothing need be installed for it.
        folders: folders there that are to hold nothing but these files.
        replace: whether what is there and differs makes way.
        report: told how many more bytes are there, sent or found.

    Raises:
        JobError: the host's files are in the way, its disk is too full, the line broke, or bytes came out wrong twice. A
            second call goes on from where the first ended.
    """
    delivery = _Delivery(host, name, python, report)
    try:
        return delivery.run(files, folders, replace=replace)
    except (OSError, EOFError, paramiko.SSHException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise JobError(
            f"{name}: copying broke off after {delivery.sent_bytes} bytes ({why}); the same command goes on from there"
        ) from error


class _Delivery:
    """One delivery to one host."""

    def __init__(
        self, host: ReceivingHost, name: str, python: Sequence[str], report: Callable[[int], object]
    ) -> None:
        self._host = host
        self._name = name
        self._python = tuple(python)
        self._report = report
        self.sent_bytes = 0
        self.sent_files = 0

    def run(self, files: Sequence[SentFile], folders: Sequence[str], *, replace: bool) -> Delivered:
        """Inspect everything first, so that a full disk or a file in the way is known before a byte is sent."""
        orders = [files[at : at + FILES_PER_ORDER] for at in range(0, len(files), FILES_PER_ORDER)]
        # A folder that holds nothing else can only be told from one order; trees of so many files are not made here.
        folders = folders if len(orders) == 1 else ()
        found = [self._inspect(order, folders, replace=replace) for order in orders]
        self._check_space(found)
        for order, places in zip(orders, found, strict=True):
            missing = [pair for pair in zip(order, places.files, strict=True) if not pair[1].same]
            self._report(
                sum(file.size for file, place in zip(order, places.files, strict=True) if place.same)
            )
            if missing:
                self._send_and_seal(missing)
        return Delivered(files=len(files), sent_files=self.sent_files, sent_bytes=self.sent_bytes)

    def _inspect(self, files: Sequence[SentFile], folders: Sequence[str], *, replace: bool) -> _Found:
        known = self._ask(
            files, {"do": "inspect", "folders": list(folders), "replace": replace, "files": _order(files)}
        )
        places = tuple(
            _Place(
                path=str(entry["path"]),
                same=entry["state"] == "same",
                arrived=_kept(file, int(entry["arrived"]), str(entry["sha256"])),
            )
            for file, entry in zip(files, known["files"], strict=True)
        )
        needed = sum(
            file.size - place.arrived for file, place in zip(files, places, strict=True) if not place.same
        )
        return _Found(files=places, needed_bytes=needed, free_bytes=int(known["free"]))

    def _check_space(self, found: Sequence[_Found]) -> None:
        needed, free = sum(each.needed_bytes for each in found), min(each.free_bytes for each in found)
        if needed > free:
            raise JobError(
                f"{self._name}: {needed / 1e6:.0f} MB are still to be copied and its disk has room for {free / 1e6:.0f}"
            )

    def _send_and_seal(self, missing: Sequence[tuple[SentFile, _Place]]) -> None:
        """Send, and what came out wrong once more."""
        with contextlib.closing(self._host.sftp()) as session:
            for attempt in range(2):
                for file, place in missing:
                    self._send(session, file, place.path, place.arrived if attempt == 0 else 0)
                files = [file for file, _ in missing]
                order = [
                    {"path": place.path, "size": file.size, "sha256": file.sha256} for file, place in missing
                ]
                bad = self._ask(files, {"do": "seal", "files": order})["bad"]
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
                    target.set_pipelined(True)  # without it each block waits for the answer to the one before
                for block in _blocks(source):
                    target.write(block)
                    self.sent_bytes += len(block)
                    self._report(len(block))

    def _ask(self, files: Sequence[SentFile], order: dict[str, Any]) -> dict[str, Any]:
        timeout_s = ANSWER_S + 2 * sum(file.size for file in files) / SLOWEST_DIGEST_BYTES_S
        program = Path(receiving.__file__).read_bytes()
        words = b"%d\n%b%b" % (len(program), program, json.dumps(order).encode())
        finished = self._host.run([*self._python, "-c", receiving.START], stdin=words, timeout_s=timeout_s)
        try:
            said = json.loads(finished.stdout)
        except ValueError as error:
            last = finished.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise JobError(
                f"{self._name}: Python there cannot look after the files (status {finished.status}): {printable(last[0])}"
            ) from error
        if "problem" in said:
            raise JobError(f"{self._name}: {printable(str(said['problem']))}")
        return dict(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What the host has of a file: all of it, or its first `arrived` bytes."""

    path: str
    same: bool
    arrived: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the host said to one order."""

    files: tuple[_Place, ...]
    needed_bytes: int
    free_bytes: int


def _order(files: Sequence[SentFile]) -> list[dict[str, object]]:
    return [{"path": file.remote, "size": file.size, "sha256": file.sha256} for file in files]


def _kept(file: SentFile, arrived: int, sha256: str) -> int:
    """How many bytes that have arrived are the file's own: all or none."""
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
