"""What the launcher asks of a job: a stop, a snapshot, a regroup."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

from poseidon.exchange.exchange import Exchange
from ps_server import ServerError, SignalKind

LOGGER = logging.getLogger(__name__)
KINDS = {
    "stop": SignalKind.STOP,
    "gone": SignalKind.STOP,
    "snapshot": SignalKind.SNAPSHOT,
    "regroup": SignalKind.REGROUP,
}


class Requests:
    """Forwards the launcher's requests to all workers (rank 0); other ranks note a stop only.

    Args:
        notes: the log line that follows a request at once; a request without one is not logged.

    Attributes:
        commands: that have come and wait.
        stopping: set once the launcher has requested a stop, or has gone.
    """

    def __init__(self, notes: Mapping[str, str]) -> None:
        self._notes = notes
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []
        self._stop_all = False
        self._root = self._is_closed = False
        self._early: list[dict[str, Any]] | None = None
        """Requests of a start after a pause that has no exchange yet; None: it has one."""
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.stopping = threading.Event()

    def take(self, command: dict[str, Any]) -> None:
        """Take a request, which waits for an exchange of its start."""
        with self._lock:
            if self._early is None:
                self.commands.put(command)
            else:
                self._early.append(command)

    def begin_start(self) -> None:
        """Begin a start after a pause: the exchanges so far are of the start before."""
        with self._lock:
            self._early = []

    def add(self, exchange: Exchange, rank: int, *, stop_all: bool = False) -> bool:
        """Add an exchange. The first one added that is not closed forwards requests. One that comes
        after a stop was requested of one that has closed requests it again. Return whether it is
        the first of all: then `forward` is to be called.

        Args:
            stop_all: whether all that are open forward a stop: the script may leave the first idle.
        """
        before, still_open = self._exchanges, [one for one in self._exchanges if not one.closed]
        self._exchanges, self._stop_all = [*still_open, exchange], stop_all
        self._root = rank == 0
        if before and self.stopping.is_set() and self._root and (stop_all or not still_open):
            exchange.control.request(SignalKind.STOP)
        with self._lock:
            early, self._early = self._early or [], None
        for command in early:
            self.commands.put(command)
        return not before

    def forward(self) -> None:
        """Forward requests until the launcher has gone."""
        do = ""
        while do != "gone":  # no command follows
            do = str(self.commands.get().get("do"))
            if do == "gone" and not self._is_closed:
                LOGGER.warning("the launcher has gone: stopping with a snapshot")
            elif do in self._notes and self._root:
                LOGGER.info("%s", self._notes[do])
            kind = KINDS.get(do)
            if kind is SignalKind.STOP:
                self.stopping.set()
            if kind is not None and self._root:
                # the training loop gets the same error and reports it
                with contextlib.suppress(ServerError):
                    exchanges = [one for one in self._exchanges if not one.closed]
                    exchanges = exchanges or self._exchanges
                    is_for_all = self._stop_all and kind is SignalKind.STOP
                    for exchange in exchanges if is_for_all else exchanges[:1]:
                        exchange.control.request(kind)

    def close(self) -> None:
        """Expect the launcher to go."""
        self._is_closed = True
