"""Hosts that an elastic job has lost, or has been given, while it runs: prepared beside it, and
taken in.

Law: a newcomer that fails, or is lost while it is prepared, disturbs nobody: it is tried again,
less and less often, and `--max_rejoins` times after it was part of the job. Its processes are given
to the next start only when all of them wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.events import encode_command
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import JobError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
PREPARED_S = 180.0
"""How long the processes of a host may take until they wait for the job."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A process that waits for the next start of the job."""

    spec: ProcessSpec
    process: RemoteProcess


class Preparing(Protocol):
    """What preparing a host needs of its job."""

    def missing_hosts(self) -> Sequence[Host]:
        """Return the hosts that the job should have and that the start that runs has not; none
        while no start runs.
        """

    def prepare(self, host: Host, listener: Waiting) -> list[Prepared]:
        """Connect and check a host, and start all processes that the job needs to go on with it.

        Raises:
            JobError: a problem of the host, in a sentence.
        """

    def take_in(self, host: Host, prepared: Sequence[Prepared]) -> None:
        """Let the job regroup: all of these processes wait."""

    def take_request(self) -> None:
        """Begin what a command has requested of the job."""

    def failed(self, host: Host, why: str, *, first: bool) -> None:
        """Note that a host could not be prepared; `first`: for the first time since it is
        missing.
        """

    def report(self, text: str) -> None:
        """Report to the user."""


class Waiting:
    """Listens to processes that are prepared, until all wait."""

    def __init__(self) -> None:
        self._heard: queue.Queue[tuple[ProcessName, str]] = queue.Queue()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `Listener`. A shard listens at once, and is asked to pause."""
        if event.get("event") in ("paused", "listening"):
            self._heard.put((name, str(event["event"])))
        if event.get("event") == "error":
            self._heard.put((name, f"{name.short}: {event.get('message')}"))

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        """See `Listener`."""

    def exited(self, name: ProcessName, status: int) -> None:
        """See `Listener`."""
        self._heard.put((name, f"{name.short} has ended while it was prepared"))

    def until_all_wait(
        self, prepared: Sequence[Prepared], stopped: Callable[[], bool], limit_s: float = PREPARED_S
    ) -> None:
        """Return when all processes have paused.

        Raises:
            JobError: one has ended, has failed, or takes too long.
        """
        left = {one.spec.name: one.process for one in prepared}
        until_s = time.monotonic() + limit_s
        while left:
            if stopped() or time.monotonic() > until_s:
                names = ", ".join(name.short for name in left)
                raise JobError(f"{names} did not wait for the job within {limit_s:g} s")
            with suppress(queue.Empty):
                name, what = self._heard.get(timeout=_POLL_S)
                if what == "listening":
                    left[name].send_line(encode_command("pause"))
                elif what == "paused":
                    left.pop(name, None)
                elif name in left:
                    raise JobError(what)


class Newcomers:
    """Prepares hosts on a thread of its own, one after another, while the job runs.

    Args:
        job: see `Preparing`.
        max_rejoins: how often a host is taken in again.
    """

    def __init__(self, job: Preparing, max_rejoins: int) -> None:
        self._job = job
        self._max_rejoins = max_rejoins
        self._taken: Counter[int] = Counter()
        self._pauses: dict[int, float] = {}
        self._due_s: dict[int, float] = {}
        self._left_out: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poseidon newcomers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def expect(self, host: Host) -> None:
        """Prepare a host that was not part of the job yet, which is no return."""
        self._taken[host.id] = -1

    def close(self) -> None:
        """Prepare no more; what is being prepared is left to whoever ends the agents."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            try:
                self._job.take_request()
                self.prepare_next(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the job goes on without
                self._job.report(f"warning: hosts that were lost are not tried again: {error!r}")
                return

    def prepare_next(self, now_s: float) -> None:
        """Prepare the first host that is missing and due, if there is any.

        Args:
            now_s: monotonic.
        """
        for host in self._job.missing_hosts():
            if self._taken[host.id] >= self._max_rejoins:
                self._leave_out(host)
            elif self._due_s.get(host.id, 0.0) <= now_s:
                self._try(host, now_s)
                return

    def _try(self, host: Host, now_s: float) -> None:
        listener = Waiting()
        prepared: list[Prepared] = []
        try:
            prepared = self._job.prepare(host, listener)
            listener.until_all_wait(prepared, self._closed.is_set)
        except JobError as error:
            for one in prepared:
                one.process.kill()
            pause_s = self._pauses.get(host.id, FIRST_PAUSE_S)
            if not self._closed.is_set():
                self._job.failed(host, str(error), first=host.id not in self._pauses)
            self._pauses[host.id] = min(2 * pause_s, LONGEST_PAUSE_S)
            self._due_s[host.id] = now_s + pause_s
            return
        self._pauses.pop(host.id, None)
        self._taken[host.id] += 1
        self._job.take_in(host, prepared)

    def _leave_out(self, host: Host) -> None:
        if host.id not in self._left_out:
            self._left_out.add(host.id)
            often = "once" if self._max_rejoins == 1 else f"{self._max_rejoins} times"
            self._job.report(
                f"client {host.id} ({host.address}) was taken in again {often} already "
                "(--max_rejoins); the job goes on without it"
            )


def of_host(prepared: Sequence[Prepared], host: Host) -> bool:
    """Return whether a worker of a host that still runs is among prepared processes."""
    return any(
        one.spec.name.client == host.id
        and one.spec.name.role is Role.WORKER
        and one.process.poll() is None
        for one in prepared
    )
