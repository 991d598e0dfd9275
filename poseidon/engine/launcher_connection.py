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
from types import MappingProxyType
from typing import Any, TextIO

import psutil
import torch

from poseidon.engine.gpu import gpu_reading
from poseidon.engine.own_time import WAITED
from poseidon.errors import JobError
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.observe.watchdog import Watchdog
from ps_server import Interrupted, ServerError, SignalKind
from ps_server.interruption import Interruption
from ps_server.link_load import sending_s

LOGGER = logging.getLogger(__name__)
JOB, WORKERS = "job", "workers"
"""Whose addresses are exchanged: the shards', without shards all workers'; or all workers'."""
HEARTBEAT_S = 2.0
CONNECT_TIMEOUT_S = 600.0
ORPHAN_S = 60.0
"""Once its launcher has gone, a worker has this long to write a snapshot and end."""
NOTHING_NOTED: Mapping[str, str] = MappingProxyType({})


PAUSED = "the job continues with different workers"


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
        self._notes = notes
        self._lock = threading.Lock()
        self._lending = threading.Lock()
        self._closed = threading.Event()
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._arrived = threading.Condition()
        self._addresses: dict[tuple[str, int], list[str]] = {}
        self.rounds: Counter[str] = Counter()
        """The exchanges of addresses that this worker has taken part in, by whose they are."""
        self._lines: list[str] = []
        self._borrower: Callable[[str], None] | None = None
        self._exchanges: list[Exchange] = []
        self._root = self._was_lent = False
        self._early: list[dict[str, Any]] | None = None
        """Requests of a start after a pause that has no exchange yet; None: it has one."""
        self._documents: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.interruption = Interruption()
        """Ends the waits of this start; a request to pause makes it."""
        self.watchdog = Watchdog()
        """Watches the training loop."""
        self.facts: dict[str, object] = {}
        """What heartbeats say of the work: `most_lead` once the exchange is built, and how far a
        script's loop has come."""
        self.device = torch.device("cpu")
        """Where this worker computes."""
        self.gone = threading.Event()
        """Set once the launcher has gone."""
        self.stopping = threading.Event()
        """Set once the launcher has requested a stop, or has gone."""

    def start(self) -> None:
        """Start to receive commands and to send heartbeats."""
        threading.Thread(target=self._receive, name="poseidon-commands", daemon=True).start()
        self._thread("poseidon-alive", self._send_heartbeats).start()

    def end_without_launcher(self) -> None:
        """Start to end this process, and its group, some time after the launcher has gone. The
        group ends with a process that ends sooner.
        """
        atexit.register(self._end_group)
        self._thread("poseidon-orphan", self._end).start()

    def send(self, event: str, **fields: object) -> None:
        """Write one event; does nothing once the launcher has gone."""
        self._write(json.dumps({"event": event, **fields}) + "\n")

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
            own: the address.
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

    def forward_requests(self, exchange: Exchange, rank: int) -> None:
        """Start to forward the launcher's requests to all workers (rank 0); other ranks note a
        stop only.

        They are forwarded by the first exchange given that is not closed. Another one that comes
        after a stop was requested of one that has closed requests it again.
        """
        before, still_open = self._exchanges, [one for one in self._exchanges if not one.closed]
        self._exchanges = [*still_open, exchange]
        self._root = rank == 0
        if not before:
            self._thread("poseidon-requests", self._forward).start()
        elif self.stopping.is_set() and self._root and not still_open:
            exchange.control.request(SignalKind.STOP)
        with self._arrived:
            early, self._early = self._early or [], None
        for command in early:
            self.commands.put(command)

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
        self.facts.clear()  # a heartbeat of the next start must not have the position of this one
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
        self._was_lent = True
        with self._lending:
            begin(self.rounds)
            for line in self._lines:
                commands(line)
            self._borrower = commands
        try:
            yield self._write
        finally:
            with self._lending:
                self._borrower = None

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closed.set()

    def finish(self, **fields: object) -> None:
        """Report the end of the work, after the times of its last seconds. The times of work that
        another process has done are that process's.
        """
        if not self._was_lent:
            self._send_heartbeat()
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

    def _forward(self) -> None:
        do = ""
        while do != "gone":  # no command follows
            do = str(self.commands.get().get("do"))
            self._forward_one(do)

    def _forward_one(self, do: str) -> None:
        if do == "gone" and not self._closed.is_set():
            LOGGER.warning("the launcher has gone: stopping with a snapshot")
        elif do in self._notes and self._root:
            LOGGER.info("%s", self._notes[do])
        kind = {
            "stop": SignalKind.STOP,
            "gone": SignalKind.STOP,
            "snapshot": SignalKind.SNAPSHOT,
            "regroup": SignalKind.REGROUP,
        }.get(do)
        if kind is SignalKind.STOP:
            self.stopping.set()
        if kind is not None and self._root:
            # the training loop gets the same error and reports it
            with contextlib.suppress(ServerError):
                exchanges = [one for one in self._exchanges if not one.closed]
                (exchanges or self._exchanges)[0].control.request(kind)

    def _receive(self) -> None:
        try:
            for line in self._inlet:
                with self._lending:
                    self._lines.append(line)
                    if self._borrower is not None:
                        self._borrower(line)
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
        self.commands.put({"do": "gone"})

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
                self._early = []
                self._documents.put(command["document"])
            elif do != "pause" and self._early is not None:
                self._early.append(command)  # the exchanges so far are of the start before
            elif do != "pause":
                self.commands.put(command)
            self._arrived.notify_all()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            if self._borrower is not None:
                continue
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        reading = self.watchdog.read()
        self.send(
            "alive",
            still_s=round(reading.still_s, 1),
            waited_s=round(reading.waited_s, 3),
            read_s=round(WAITED.waited_s, 3),
            **self.of_host(),
            **({"gpu": gpu} if (gpu := gpu_reading(self.device)) else {}),
            **self.facts,
        )

    def of_host(self) -> dict[str, object]:
        """Return what a heartbeat says of the host."""
        return {"sending_s": sending_s(), "host_busy": psutil.cpu_percent() / 100}
