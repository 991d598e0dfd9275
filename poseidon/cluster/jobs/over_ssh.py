"""Asks hosts about their jobs over SSH: runs `poseidon.cluster.jobs.this_host` there.

    with SshAsk(SshSettings(), own) as ask:
        jobs, problems = list_far(far_hosts(clients), ask)

Law: one connection a host for as long as the block lasts; thread-safe, for different hosts are asked at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from poseidon.cluster.jobs.this_host import Answer
from poseidon.cluster.machinefile import Host
from poseidon.cluster.remote_python import LauncherEnvironment, module_words
from poseidon.cluster.ssh.config import SshSettings
from poseidon.cluster.ssh.connections import SshHost, close_all, connect
from poseidon.errors import JobError, printable

ANSWER_TIMEOUT_S = 120.0
_LAST_WORDS = 300


class SshAsk:
    """See the module's head.

    Args:
        settings: of the connections.
        own: where this process runs.
    """

    def __init__(self, settings: SshSettings, own: LauncherEnvironment) -> None:
        self._settings = settings
        self._own = own
        self._connections: dict[Host, SshHost] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SshAsk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        close_all(self._connections.values())
        self._connections.clear()

    def __call__(self, host: Host, request: Mapping[str, object]) -> Sequence[Answer]:
        """Ask a host.

        Raises:
            JobError: it cannot be reached, or has no Poseidon that answers.
        """
        connection = self._connection(host)
        argv = module_words(host, self._own, "poseidon.cluster.jobs.this_host")
        done = connection.run(argv, stdin=json.dumps(request).encode() + b"\n", timeout_s=ANSWER_TIMEOUT_S)
        if done.status != 0:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no word why"]
            raise JobError(
                f"{connection.words}: it cannot say which jobs it has: {printable(last[0][:_LAST_WORDS])}"
            )
        return [answer for line in done.stdout.splitlines() if (answer := _decode(line)) is not None]

    def _connection(self, host: Host) -> SshHost:
        with self._lock:
            connection = self._connections.get(host)
        if connection is not None and connection.alive:
            return connection
        connection = connect(host, self._settings)
        with self._lock:
            self._connections[host] = connection
        return connection


def _decode(line: bytes) -> Answer | None:
    """A line of the answer; None for what a login script may have written."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
