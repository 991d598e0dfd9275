"""A worker's connection to its launcher: events out, commands in (`poseidon.cluster.events`
lists both).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TextIO

from poseidon.engine.heartbeat import HeartbeatSender
from poseidon.engine.launcher_requests import Requests
from poseidon.errors import JobError
from poseidon.exchange.exchange import Exchange
from ps_server import Interrupted
from ps_server.json_fields import plain
from ps_server.monitor import Interruption

LOGGER = logging.getLogger(__name__)
JOB, WORKERS = "job", "workers"
"""Whose addresses are exchanged: the shards', without shards all workers'; or all workers'."""
CONNECT_TIMEOUT_S = 600.0
ORPHAN_S = 60.0
"""Once its launcher has gone, a worker has this long to write a snapshot and end."""
NOTHING_NOTED: Mapping[str, str] = MappingProxyType({})


PAUSED = "the job continues with different workers"


class Loan:
    """A connection that is lent to another process: what comes goes there, too.

    Attributes:
        borrower: takes what comes; None: it is not lent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self.borrower: Callable[[str], None] | None = None
        self.was_lent = False

    def take(self, line: str) -> None:
        """Pass on a line of the launcher."""
        with self._lock:
            self._lines.append(line)
            if self.borrower is not None:
                self.borrower(line)

    @contextmanager
    def lending(self, commands: Callable[[str], None], begin: Callable[[], None]) -> Iterator[None]:
        """Lend it inside the block; see `LauncherConnection.lent`."""
        self.was_lent = True
        with self._lock:
            begin()
            for line in self._lines:
                commands(line)
            self.borrower = commands
        try:
            yield
        finally:
            with self._lock:
                self.borrower = None


class LauncherConnection:
    """Sends events and a heartbeat every two seconds; receives commands.

    Args:
        notes: the log line that follows a request at once; a request without one is not logged.
    """

    def __init__(
        self, inlet: TextIO, outlet: TextIO, *, notes: Mapping[str, str] = NOTHING_NOTED
    ) -> None:
        self._inlet = inlet
        self._outlet = outlet
        self._lock = threading.Lock()
        self._arrived = threading.Condition()
        self._addresses: dict[tuple[str, int], list[str]] = {}
        self.rounds: Counter[str] = Counter()
        """The exchanges of addresses that this worker has taken part in, by whose they are."""
        self._loan = Loan()
        self._documents: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.interruption = Interruption()
        """Ends the waits of this start; a request to pause makes it."""
        self.heartbeat = HeartbeatSender(self.send)
        self.requests = Requests(notes)
        self.gone = threading.Event()
        """Set once the launcher has gone."""

    def start(self) -> None:
        """Start to receive commands and to send heartbeats."""
        threading.Thread(target=self._receive, name="poseidon-commands", daemon=True).start()
        beating = partial(self.heartbeat.run, lambda: self._loan.borrower is None)
        self._thread("poseidon-alive", beating).start()

    def end_without_launcher(self) -> None:
        """Start to end this process, and its group, some time after the launcher has gone. The
        group ends with a process that ends sooner.
        """
        atexit.register(self._end_group)
        self._thread("poseidon-orphan", self._end).start()

    def send(self, event: str, **fields: object) -> None:
        """Write one event; does nothing once the launcher has gone."""
        self._write(json.dumps({"event": event, **fields}, default=plain) + "\n")

    def _write(self, line: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._outlet.write(line)
            self._outlet.flush()

    def exchange_addresses(self, own: str = "", *, among: str = JOB) -> list[str]:
        """Report the address at which this worker listens, unless it is empty, and wait for the
        addresses of the job.

        All workers of the job take part in each exchange, in the same order. Each shard has a new
        address in every exchange. A request to stop that comes meanwhile waits for
        `forward_requests`.

        Args:
            among: `JOB` or `WORKERS`.

        Returns:
            Of the job the shards' addresses in shard order; without shards, and of the workers, the
            addresses of all workers, by rank.

        Raises:
            JobError: they did not come within ten minutes, or the launcher has gone.
            Interrupted: the launcher requests a pause.
        """
        number = self.rounds[among]
        at = among, number
        self.rounds[among] += 1
        if own:
            self.send("listening", address=own, round=number, among=among)
        elif number:  # for the first the shards listen unasked
            self.send("connecting", round=number, among=among)
        with self._arrived:
            self._arrived.wait_for(
                lambda: (
                    at in self._addresses
                    or self.gone.is_set()
                    or self.interruption.error is not None
                ),
                CONNECT_TIMEOUT_S,
            )
            if at in self._addresses:
                return self._addresses[at]
        self.interruption.check()
        if self.gone.is_set():
            raise JobError("the job was stopped before training began")
        raise JobError("the launcher has not sent the addresses of the job")

    def forward_requests(self, exchange: Exchange, rank: int, *, stop_all: bool = False) -> None:
        """Start to forward the launcher's requests to all workers; see `Requests.add`."""
        if self.requests.add(exchange, rank, stop_all=stop_all):
            self._thread("poseidon-requests", self.requests.forward).start()

    @property
    def is_asked_to_pause(self) -> bool:
        """Whether the launcher has requested a pause of this start."""
        return isinstance(self.interruption.error, Interrupted)

    def pause(
        self,
        snapshot: int | None,
        message: str = "",
        *,
        regrouped: bool = False,
        is_part: bool = False,
    ) -> Mapping[str, Any]:
        """Report that this worker has paused; return the document of the next start.

        Args:
            snapshot: the iteration of the newest complete memory snapshot that it holds.
            message: why it has paused by itself, a sentence; empty: it was asked to.
            regrouped: it has paused with all others, after the same iteration.
            is_part: the snapshot is this worker's part of a module that is divided.

        Raises:
            JobError: the launcher has gone.
        """
        self.heartbeat.facts.clear()  # the next start must not have the position of this one
        self.send(
            "paused", snapshot=snapshot, is_part=is_part, message=message, regrouped=regrouped
        )
        document = self._documents.get()
        if document is None:
            raise JobError("the launcher has gone while the worker was paused")
        return document

    @contextmanager
    def lent(
        self, commands: Callable[[str], None], begin: Callable[[Mapping[str, int]], None]
    ) -> Iterator[Callable[[str], None]]:
        """Lend the connection to another process inside the block, which sends heartbeats too.

        Args:
            commands: takes each line of the launcher, also those that have come before.
            begin: is called before them, with `rounds`.

        Yields:
            a function that sends a line of the other process.
        """
        with self._loan.lending(commands, lambda: begin(self.rounds)):
            yield self._write

    def close(self) -> None:
        """Stop the heartbeats."""
        self.heartbeat.close()
        self.requests.close()

    def finish(self, **fields: object) -> None:
        """Report the end of the work, after the times of its last seconds. The times of work that
        another process has done are that process's.
        """
        if not self._loan.was_lent:
            self.heartbeat.beat()
        self.send("done", **fields)

    def _end(self) -> None:
        self.gone.wait()
        time.sleep(ORPHAN_S)
        self._end_group()
        os._exit(1)

    def _end_group(self) -> None:
        """End this process with what the user's code has started, once the launcher has gone: until
        then the launcher does it.
        """
        if self.gone.is_set() and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the launcher ends the job
                message = f"the thread {name} failed: {type(error).__name__}: {error}"
                LOGGER.error("%s", message)
                self.send("error", message=message, exit_code=1)

        return threading.Thread(target=run, name=name, daemon=True)

    def _receive(self) -> None:
        try:
            for line in self._inlet:
                self._loan.take(line)
                with contextlib.suppress(ValueError):  # not JSON
                    command = json.loads(line)
                    if isinstance(command, dict):
                        self._take(command)
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the worker stops as without a launcher
            LOGGER.warning("the launcher's commands cannot be read: %r", error)
        self.gone.set()
        with self._arrived:
            self._arrived.notify_all()
        self._documents.put(None)
        self.requests.commands.put({"do": "gone"})

    def _take(self, command: dict[str, Any]) -> None:
        do = command.get("do")
        if do == "pause":
            self.interruption.interrupt(Interrupted(PAUSED))
        with self._arrived:
            if do == "connect":
                at = str(command.get("among", JOB)), int(command.get("round", 0))
                self._addresses[at] = [str(address) for address in command["addresses"]]
            elif do == "go_on":  # the addresses that follow are of the next start
                self.interruption = Interruption()
                self._addresses.clear()
                self.rounds.clear()
                self.requests.begin_start()
                self._documents.put(command["document"])
            elif do != "pause":
                self.requests.take(command)
            self._arrived.notify_all()
