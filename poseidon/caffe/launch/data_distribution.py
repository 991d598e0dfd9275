"""Sends each client its part of a divided database or list."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from poseidon.caffe.data.prepare.split import PartFiles, part_files
from poseidon.caffe.data.staging import CHECKING, COPYING, Report
from poseidon.cluster.agent.delivery import SentFile, deliver, sent_file
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import close_agents
from poseidon.cluster.dial.ssh import dial_all
from poseidon.cluster.machinefile import Host, SshSettings
from poseidon.cluster.process import format_problems
from poseidon.errors import JobError, UsageError, counted
from poseidon.launcher.site import launcher_environment

MOST_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFiles:
    """The files of one client.

    Attributes:
        files: with their paths on its host.
        folders: on its host, that hold nothing else.
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
    """Copy part k of `source` to the k-th of the clients that work. Return a sentence for each
    client.

    Args:
        source: the database or list, divided into as many parts as clients work.
        root: see `part_files`.
        replace: whether other files of these names are replaced.

    Raises:
        DataError: a part is missing.
        JobError: lists the problems of all clients; what has arrived stays, and a second call sends
            the rest.
    """
    working = [client for client in clients if client.works]
    parts = [part_files(source, number, root=root) for number in range(len(working))]
    others = [
        (client, part) for client, part in zip(working, parts, strict=True) if not client.is_here
    ]
    if not others:
        return [f"{client_name(client)}: this machine, where its part is" for client in working]
    with ExitStack() as stack:
        # The workdir of a client may not exist yet.
        lines = [dataclasses.replace(client, workdir=None) for client, _ in others]
        agents = dial_all(lines, ssh or SshSettings(), launcher_environment())
        stack.callback(close_agents, agents.values())
        deliveries = _plan(others, report)
        sentences = _deliver_all(deliveries, agents, replace=replace, report=report)
    return [
        sentences.get(client.id, f"{client_name(client)}: this machine, where its part is")
        for client in working
    ]


def client_name(client: Host) -> str:
    """Return `client 1 (node1)`."""
    return f"client {client.id} ({client.name})"


def remote_path(path: Path, client: Host) -> str:
    """Return the path of a local file on a client's host.

    A relative path is below the client's `workdir`; without one the host has the same path as this
    machine.

    Raises:
        UsageError: it would leave the workdir.
    """
    if path.is_absolute() or client.workdir is None:
        return str(path.absolute())
    if ".." in path.parts:
        raise UsageError(
            f"{path} cannot be placed in the workdir of {client_name(client)}: it leads out of it "
            "by '..'"
        )
    return str(PurePosixPath(client.workdir) / PurePosixPath(path))


def _plan(others: Sequence[tuple[Host, PartFiles]], report: Report) -> list[ClientFiles]:
    """Read all files that are to be sent, for their checksums."""
    every = {file for _, part in others for file in part.files}
    total = sum(file.stat().st_size for file in every if file.is_file())
    count = _SharedProgress(report, CHECKING, total)
    known: dict[Path, SentFile] = {}
    deliveries = []
    for client, part in others:
        files = []
        for path in part.files:
            if path not in known:
                known[path] = sent_file(path, "", count.add)
            file = known[path]
            remote = remote_path(path, client)
            files.append(SentFile(local=path, remote=remote, size=file.size, sha256=file.sha256))
        folders = tuple(remote_path(folder, client) for folder in part.folders)
        deliveries.append(ClientFiles(client=client, files=tuple(files), folders=folders))
    return deliveries


def _deliver_all(
    deliveries: Sequence[ClientFiles],
    agents: Mapping[int, RemoteAgent],
    *,
    replace: bool,
    report: Report,
) -> dict[int, str]:
    """Send to all clients at once; return the sentence of each, by the client's id."""
    count = _SharedProgress(report, COPYING, sum(delivery.size for delivery in deliveries))

    def one(delivery: ClientFiles) -> str | JobError:
        place = client_name(delivery.client)
        try:
            done = deliver(
                delivery.files,
                agents[delivery.client.id],
                name=place,
                folders=delivery.folders,
                replace=replace,
                report=count.add,
            )
        except JobError as error:
            return error
        sent = f"{done.sent_files} of them sent, {done.sent_bytes / 1e6:.1f} MB"
        return f"{place}: {counted(done.files, 'file')}, {sent}"

    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(deliveries)), "poseidon delivery") as pool:
        try:
            outcomes = list(pool.map(one, deliveries))
        except BaseException:  # Ctrl-C: nothing waits for what is still being sent
            close_agents(agents.values())
            raise
    problems = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
    if problems:
        raise JobError(format_problems(problems, of=len(deliveries)))
    return {
        delivery.client.id: str(outcome)
        for delivery, outcome in zip(deliveries, outcomes, strict=True)
    }


class _SharedProgress:
    """Adds up the progress of several threads, for one bar."""

    def __init__(self, report: Report, activity: str, total: int) -> None:
        self._report = report
        self._activity = activity
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        """Add to what is done."""
        with self._lock:
            self._done += more
            self._report(self._activity, self._done, self._total)
