"""Copying files to a host through its agent; an interrupted copy is resumed.

Law: a file gets its name on the host only when its SHA-256 there equals ours (`files.py`). The
partial file of an interrupted copy is compared and continued; a file that is there already is not
sent again; one that differs is refused, unless it is to be replaced. Files get their names in the
order in which they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.cluster.agent.files import arriving_path, digest
from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.errors import JobError, printable

# Files in one request: bounds the request and what is lost with a dead host.
FILES_PER_REQUEST = 2000
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
    try:
        sha256, size = digest(local, report=report)
    except OSError as error:
        raise JobError(f"cannot read {local}, which is to be copied: {error.strerror}") from error
    return SentFile(local=local, remote=remote, size=size, sha256=sha256)


def deliver(
    files: Sequence[SentFile],
    agent: RemoteAgent,
    *,
    name: str,
    folders: Sequence[str] = (),
    replace: bool = False,
    report: Callable[[int], object] = lambda _: None,
) -> Delivered:
    """Copy files to a host.

    Args:
        files: in the order in which they get their names; the file that makes the others usable
            comes last.
        agent: of the host.
        name: the host in messages: `client 1 (node1)`.
        folders: folders on the host that are to hold nothing but these files.
        replace: whether to replace files that are there and differ.
        report: called with the number of further bytes that are on the host, sent or found.

    Raises:
        JobError: other files are there, the disk is too full, the connection broke, or a checksum
            was wrong twice. A second call continues where the first ended.
    """
    delivery = _Delivery(agent, name, report)
    try:
        return delivery.run(files, folders, replace=replace)
    except OSError as error:
        raise delivery.broken(error.strerror or str(error)) from error


class _Delivery:
    """One delivery to one host."""

    def __init__(self, agent: RemoteAgent, name: str, report: Callable[[int], object]) -> None:
        self._agent = agent
        self._name = name
        self._report = report
        self.sent_bytes = 0
        self.sent_files = 0

    def broken(self, why: str) -> JobError:
        """Return the error of a copy that could not continue."""
        return JobError(
            f"{self._name}: copying broke off after {self.sent_bytes} bytes ({why}); run the same "
            "command again to continue"
        )

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
        self._check_space(
            [pair for pairs, _ in found for pair in pairs], min(free for _, free in found)
        )
        for pairs, _ in found:
            self._report(sum(file.size for file, place in pairs if place.same))
            if missing := [pair for pair in pairs if not pair[1].same]:
                self._send_and_seal(missing)
        return Delivered(files=len(files), sent_files=self.sent_files, sent_bytes=self.sent_bytes)

    def _inspect(
        self, files: Sequence[SentFile], folders: Sequence[str], *, replace: bool
    ) -> tuple[list[_Pair], int]:
        """Return the files with their states, and the free bytes of the host."""
        fields = [_fields(file, file.remote) for file in files]
        request = {"do": "inspect", "folders": list(folders), "replace": replace, "files": fields}
        known = self._request(files, request)
        pairs = [
            (
                file,
                _FileState(
                    path=str(entry["path"]),
                    same=entry["state"] == "same",
                    arrived=_resumable_bytes(file, int(entry["arrived"]), str(entry["sha256"])),
                ),
            )
            for file, entry in zip(files, known["files"], strict=True)
        ]
        return pairs, int(known["free"])

    def _check_space(self, pairs: Sequence[_Pair], free: int) -> None:
        needed = sum(file.size - place.arrived for file, place in pairs if not place.same)
        if needed > free:
            raise JobError(
                f"{self._name}: {needed / 1e6:.0f} MB are still to be copied and its disk has "
                f"room for {free / 1e6:.0f}"
            )

    def _send_and_seal(self, missing: Sequence[_Pair]) -> None:
        """Send the files; send those with a wrong checksum once more."""
        for attempt in range(2):
            for file, place in missing:
                self._send(file, place.path, place.arrived if attempt == 0 else 0)
            files = [file for file, _ in missing]
            fields = [_fields(file, place.path) for file, place in missing]
            bad = self._request(files, {"do": "seal", "files": fields})["bad"]
            missing = [missing[number] for number in bad]
            if not missing:
                return
        raise JobError(
            f"{self._name}: {missing[0][1].path} has a different checksum there than here, after "
            "two tries; did it change here while it was copied?"
        )

    def _send(self, file: SentFile, path: str, begin: int) -> None:
        self._report(begin)
        self.sent_files += 1

        def sent(size: int) -> None:
            self.sent_bytes += size
            self._report(size)

        try:
            self._agent.send_file(file.local, arriving_path(path), begin, sent)
        except JobError as error:
            raise self.broken(str(error).removeprefix(f"{self._agent.label}: ")) from error

    def _request(self, files: Sequence[SentFile], request: dict[str, Any]) -> dict[str, Any]:
        timeout_s = ANSWER_S + 2 * sum(file.size for file in files) / MIN_DIGEST_BYTES_S
        try:
            answer = dict(self._agent.ask(Service.FILES, request, timeout_s))
        except JobError as error:
            raise self.broken(str(error).removeprefix(f"{self._agent.label}: ")) from error
        if "problem" in answer:
            raise JobError(f"{self._name}: {printable(str(answer['problem']))}")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileState:
    """The state of a file on the host: complete, or its first `arrived` bytes."""

    path: str
    same: bool
    arrived: int


_Pair = tuple[SentFile, _FileState]


def _fields(file: SentFile, path: str) -> dict[str, object]:
    return {"path": path, "size": file.size, "sha256": file.sha256}


def _resumable_bytes(file: SentFile, arrived: int, sha256: str) -> int:
    """Return how many of the bytes that have arrived belong to the file: all or none."""
    if not 0 < arrived <= file.size:
        return 0
    return arrived if digest(file.local, arrived) == (sha256, arrived) else 0
