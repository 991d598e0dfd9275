"""Bringing each client its part of a divided database or list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.cluster.parallel import format_problems
from poseidon.cluster.remote_python import RemotePython
from poseidon.cluster.ssh.config import SshSettings
from poseidon.cluster.ssh.connections import SshConnection, close_all, connect_all
from poseidon.cluster.ssh.delivery import SentFile, SftpConnection, deliver, sent_file
from poseidon.data.prepare.part_files import PartFiles, part_files
from poseidon.data.progress import CHECKING, COPYING, Report
from poseidon.errors import JobError, UsageError
from poseidon.launch.site import launcher_environment

MOST_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What one client gets.

    Attributes:
        client: who.
        files: with their places there.
        folders: there, that hold nothing else.
    """

    client: Host
    files: tuple[SentFile, ...]
    folders: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def distribute(
    source: Path,
    clients: Sequence[Host],
    *,
    root: str,
    replace: bool,
    report: Report,
    ssh: SshSettings | None = None,
) -> list[str]:
    """Copy part k of `source` to the k-th of the clients that work.

    Args:
        source: what was divided, as many parts as clients work.
        clients: of the machinefile.
        root: see `part_files`.
        replace: whether other files in their places make way.
        report: told how far it is.
        ssh: of the connections.

    Returns:
        one sentence a client.

    Raises:
        DataError: a part is not there.
        JobError: lists the problems of all clients; what has arrived stays, and a second call goes on from there.
    """
    working = [client for client in clients if client.works]
    parts = [part_files(source, number, root=root) for number in range(len(working))]
    away = [
        (client, part) for client, part in zip(working, parts, strict=True) if not is_loopback(client.address)
    ]
    if not away:
        return [f"{place_of(client)}: this machine, where its part is" for client in working]
    with ExitStack() as stack:
        hosts = connect_all([client for client, _ in away], ssh or SshSettings())
        stack.callback(close_all, set(hosts.values()))
        parcels = _pack(away, report)
        said = _deliver_all(parcels, hosts, replace=replace, report=report)
    return [said.get(client.id, f"{place_of(client)}: this machine, where its part is") for client in working]


def place_of(client: Host) -> str:
    """`client 1 (node1)`."""
    return f"client {client.id} ({client.address})"


def place_there(path: Path, client: Host) -> str:
    """Where a file of ours lies on a client's host.

    A relative path is meant in the client's `workdir`; without one the host is taken to be laid out like this machine.

    Raises:
        UsageError: it would leave the workdir.
    """
    if path.is_absolute() or client.workdir is None:
        return str(path.absolute())
    if ".." in path.parts:
        raise UsageError(
            f"{path} cannot be placed in the workdir of {place_of(client)}: it leads out of it by '..'"
        )
    return str(PurePosixPath(client.workdir) / PurePosixPath(path))


def _pack(away: Sequence[tuple[Host, PartFiles]], report: Report) -> list[Parcel]:
    """Read all that is to be sent, for its checksums."""
    every = {file for _, part in away for file in part.files}
    total = sum(file.stat().st_size for file in every if file.is_file())
    count = _Count(report, CHECKING, total)
    known: dict[Path, SentFile] = {}
    parcels = []
    for client, part in away:
        files = []
        for path in part.files:
            if path not in known:
                known[path] = sent_file(path, "", count.add)
            file = known[path]
            remote = place_there(path, client)
            files.append(SentFile(local=path, remote=remote, size=file.size, sha256=file.sha256))
        folders = tuple(place_there(folder, client) for folder in part.folders)
        parcels.append(Parcel(client=client, files=tuple(files), folders=folders))
    return parcels


def _deliver_all(
    parcels: Sequence[Parcel], hosts: Mapping[int, SshConnection], *, replace: bool, report: Report
) -> dict[int, str]:
    """All clients at once; what each delivery came to, by the client's id."""
    count = _Count(report, COPYING, sum(parcel.size for parcel in parcels))

    def one(parcel: Parcel) -> str | JobError:
        try:
            return _deliver_one(parcel, hosts[parcel.client.id], replacing=replace, report=count.add)
        except JobError as error:
            return error

    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(parcels)), "poseidon delivery") as pool:
        try:
            outcomes = list(pool.map(one, parcels))
        except BaseException:  # Ctrl-C: nobody waits for what is still on its way
            close_all(hosts.values())
            raise
    problems = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
    if problems:
        raise JobError(format_problems(problems, of=len(parcels)))
    return {parcel.client.id: str(outcome) for parcel, outcome in zip(parcels, outcomes, strict=True)}


def _deliver_one(
    parcel: Parcel, host: SftpConnection, *, replacing: bool, report: Callable[[int], object]
) -> str:
    place = place_of(parcel.client)
    done = deliver(
        parcel.files,
        host,
        name=place,
        python=RemotePython.of(
            replace(parcel.client, workdir=None), launcher_environment()
        ).command(),  # it may not be there yet
        folders=parcel.folders,
        replace=replacing,
        report=report,
    )
    return f"{place}: {done.files} files, {done.sent_files} of them sent, {done.sent_bytes / 1e6:.1f} MB"


class _Count:
    """Adds up what several threads have done, for one bar."""

    def __init__(self, report: Report, activity: str, total: int) -> None:
        self._report = report
        self._activity = activity
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        """More is done."""
        with self._lock:
            self._done += more
            self._report(self._activity, self._done, self._total)
