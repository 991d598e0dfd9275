"""Workers that are threads of this process: a whole job in a tenth of the time.

For jobs of one worker without a server. The worker's code runs as it does in a process of its own,
from the job document on; what it would write to standard output goes straight to the listener.
"""

from __future__ import annotations

import io
import os
import threading

from poseidon.caffe.solver.worker import SolverWork
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.engine.document import JobDocument, read_document
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.process import run_work
from poseidon.exchange.exchange import Exchange
from poseidon.launcher.site import Site


class ThreadConnection(LauncherConnection):
    """Sends events to a listener."""

    def __init__(self, name: ProcessName, listener: Listener) -> None:
        super().__init__(io.StringIO(), io.StringIO())
        self._name = name
        self._listener = listener

    def start(self) -> None:
        """No standard input to listen to, and the job is too short for heartbeats."""

    def send(self, event: str, **fields: object) -> None:
        self._listener.event(self._name, {"event": event, **fields})

    def forward_requests(self, exchange: Exchange, rank: int, *, stop_all: bool = False) -> None:
        """No command comes."""


class ThreadProcess:
    """A worker's thread, as its launcher sees it."""

    def __init__(self, spec: ProcessSpec, listener: Listener) -> None:
        self.name = spec.name
        self.pid = os.getpid()
        self.created = ""
        self._spec = spec
        self._listener = listener
        self._status: int | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"poseidon {spec.name.short}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        launcher = ThreadConnection(self.name, self._listener)
        document = read_document(JobDocument, self._spec.first_line)
        self._status = run_work(SolverWork(document, launcher))
        self._listener.exited(self.name, self._status)

    def await_start(self) -> None:
        """It runs already."""

    def send_line(self, line: bytes) -> None:
        """Commands are ignored."""

    def poll(self) -> int | None:
        return self._status

    def terminate(self) -> None:
        """A worker that has reported an error ends by itself."""

    def kill(self) -> None:
        """As `terminate`."""

    def close(self) -> None:
        self._thread.join(60)


def start_thread(site: Site, spec: ProcessSpec, client: Host, listener: Listener) -> ThreadProcess:
    """Take the place of `Site.start`."""
    return ThreadProcess(spec, listener)
