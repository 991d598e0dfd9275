"""The line between a worker and its launcher: events out, commands in (`poseidon.cluster.events` has the list)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from dataclasses import asdict
from typing import Any, TextIO

from poseidon.engine.module.workplace import Standing
from poseidon.errors import JobError
from poseidon.exchange.base import Exchange
from poseidon.exchange.observe.watchdog import Watchdog
from ps_server import ServerError, SignalKind

LOGGER = logging.getLogger("poseidon.engine.solver.worker")
ALIVE_S = 2.0
CONNECT_TIMEOUT_S = 600.0
ORPHAN_S = 60.0
"""Once its launcher has gone, a worker has this long to write a snapshot and end."""

NOTES = {
    "stop": "asked to stop: ending after a few iterations; a test ends with its batch; a second request ends the job at once",
    "snapshot": "asked for a snapshot: writing it after the iteration or test under way",
}
"""What the user reads at once after a signal: a test pass may keep the job busy for a while."""


class Control:
    """The line to the launcher: events out, commands in, a sign of life every two seconds.

    Args:
        inlet: where commands come from; standard input when not given.
        outlet: where events go; standard output when not given.
    """

    notes = NOTES

    def __init__(self, inlet: TextIO | None = None, outlet: TextIO | None = None) -> None:
        self._inlet = inlet
        self._outlet = outlet
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.watchdog = Watchdog()
        """Of the loop that this process is for."""
        self.standing: Standing | None = None
        """Of the loop of a script; None: there is none."""
        self.gone = threading.Event()
        """Set once the launcher has gone."""
        self.stopping = threading.Event()
        """Set once the launcher has asked for the end, or has gone."""

    def start(self) -> None:
        """Listen and show life from now on."""
        threading.Thread(target=self._listen, name="poseidon-commands", daemon=True).start()
        threading.Thread(target=self._beat, name="poseidon-alive", daemon=True).start()

    def tell(self, event: str, **fields: object) -> None:
        """Write one event; a launcher that has gone hears nothing."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            outlet = self._outlet or sys.stdout
            outlet.write(json.dumps({"event": event, **fields}) + "\n")
            outlet.flush()

    def await_connect(self) -> list[str]:
        """Wait for the shards' addresses."""
        while True:
            try:
                command = self.commands.get(timeout=CONNECT_TIMEOUT_S)
            except queue.Empty as error:
                raise JobError("the launcher never said where the shards are") from error
            if command.get("do") == "connect":
                return [str(address) for address in command["shards"]]
            if command.get("do") in ("stop", "gone"):
                raise JobError("the job was stopped before training began")

    def obey(self, exchange: Exchange, rank: int) -> None:
        """From now on pass the launcher's wishes on to all workers (rank 0)."""
        threading.Thread(target=self._obey, args=(exchange, rank), name="poseidon-obey", daemon=True).start()

    def close(self) -> None:
        """Stop showing life."""
        self._over.set()

    def _obey(self, exchange: Exchange, rank: int) -> None:
        while True:
            do = self.commands.get().get("do")
            if do == "gone":
                LOGGER.warning("the launcher has gone: stopping with a snapshot")
                timer = threading.Timer(ORPHAN_S, os._exit, args=(1,))
                timer.daemon = True
                timer.start()
            elif do in self.notes and rank == 0:
                LOGGER.info("%s", self.notes[do])
            kind = {"stop": SignalKind.STOP, "gone": SignalKind.STOP, "snapshot": SignalKind.SNAPSHOT}.get(
                str(do)
            )
            if kind is SignalKind.STOP:
                self.stopping.set()
            if kind is not None and rank == 0:
                with contextlib.suppress(ServerError):  # the loop meets the same error and tells it
                    exchange.control.request(kind)

    def _listen(self) -> None:
        for line in self._inlet or sys.stdin:
            try:
                command = json.loads(line)
            except ValueError:
                continue
            if isinstance(command, dict):
                self.commands.put(command)
        self.gone.set()
        self.commands.put({"do": "gone"})

    def _beat(self) -> None:
        while not self._over.wait(ALIVE_S):
            reading = self.watchdog.read()
            standing = asdict(self.standing) if self.standing is not None else {}
            self.tell(
                "alive", still_s=round(reading.still_s, 1), waited_s=round(reading.waited_s, 3), **standing
            )
