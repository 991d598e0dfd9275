"""Hosts that are prepared beside a job that runs: when they are tried, and until when they wait.

Law: a newcomer that fails, or is lost while it is prepared, disturbs nobody. Its processes are
given to the next start only when all of them wait.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.events import encode_command
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import JobError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
PREPARED_S = 180.0
"""How long the processes of a host may take until they wait for the job."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedProcess:
    """A process that waits for the next start of the job."""

    spec: ProcessSpec
    process: RemoteProcess

    @property
    def works(self) -> bool:
        """Whether it is a worker that still runs."""
        return self.spec.name.role is Role.WORKER and self.process.poll() is None


class NewcomerListener:
    """The `Listener` of processes that are prepared, until all wait."""

    def __init__(self) -> None:
        self._heard: queue.Queue[tuple[ProcessName, str]] = queue.Queue()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """Note that a process waits. A shard listens at once, and is asked to pause."""
        if event.get("event") in ("paused", "listening"):
            self._heard.put((name, str(event["event"])))
        if event.get("event") == "error":
            message = str(event.get("message"))  # many begin with the worker that sends them
            told = message if message.startswith(name.short) else f"{name.short}: {message}"
            self._heard.put((name, told))

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        pass

    def exited(self, name: ProcessName, status: int) -> None:
        self._heard.put((name, f"{name.short} has ended while it was prepared"))

    def until_all_wait(
        self,
        prepared: Sequence[PreparedProcess],
        stopped: Callable[[], bool],
        limit_s: float = PREPARED_S,
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


@dataclass(slots=True)
class Returns:
    """The returns of one host that was lost; pure.

    Attributes:
        taken_in: how often it was taken in again.
        failures: attempts that failed, since it was lost.
        due_s: when the next attempt is due, monotonic.
        reported: the user knows that it is not tried any more.
    """

    taken_in: int = 0
    failures: int = 0
    due_s: float = 0.0
    reported: bool = False

    def fail(self, now_s: float) -> None:
        """Note an attempt that has failed: the next one comes later each time."""
        self.due_s = now_s + min(FIRST_PAUSE_S * 2.0**self.failures, LONGEST_PAUSE_S)
        self.failures += 1

    def succeed(self) -> None:
        """Note that the host is taken in again."""
        self.taken_in += 1
        self.failures = 0
