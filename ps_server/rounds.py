"""The servers of one shard's process: one for each round in which the job's workers connect.

Each round has a state machine, an address and a thread of its own. A script that distributes two
modules has two.

A process that its launcher pauses closes all rounds. It continues with round 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, replace

from ps_server.errors import ServerError, as_server_error
from ps_server.numerics import prepare_thread
from ps_server.server import Server
from ps_server.statistics import ShardStatistics

POLL_S = 0.5
OF_THIS_MOMENT = ("longest_queue", "peak_bytes")
"""Statistics that are not sums over the rounds: the largest counts."""


class Rounds:
    """See the module's docstring.

    Args:
        open_server: opens the server of a round, by its number.
    """

    def __init__(self, open_server: Callable[[int], Server]) -> None:
        self._open_server = open_server
        self._changed = threading.Condition()
        self._servers: list[Server] = []
        self._running: list[Server] = []
        self._turns: dict[Server, int] = {}
        self._idle_limit_s: float | None = None
        self._stopping = False
        self._failure: ServerError | None = None
        self._ended: list[ShardStatistics] = []

    def listen(self) -> str:
        """Open the next round; return where its clients reach it."""
        server = self._open_server(len(self._servers))
        with self._changed:
            self._servers.append(server)
            self._running.append(server)
            if self._idle_limit_s is not None:
                server.stop_when_idle(self._idle_limit_s)
            if self._stopping:
                server.stop()
        name = f"ps-round-{len(self._servers) - 1}"
        threading.Thread(target=self._serve, args=(server,), name=name, daemon=True).start()
        return server.address

    def _serve(self, server: Server) -> None:
        prepare_thread()
        try:
            server.serve()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: `wait` raises the error
            self.failing("serving the workers failed")(error)
        finally:
            with self._changed:
                self._running.remove(server)
                self._changed.notify_all()

    def pause(self) -> None:
        """End all rounds at once, and return when they have let go of their addresses; what is
        queued is dropped, and only their counters stay.
        """
        with self._changed:
            for server in self._servers:
                server.drop()
            while self._running:
                self._changed.wait(POLL_S)
            for server in self._servers:
                self._ended.append(replace(server.statistics(), queue=0, memory_bytes=0))
            self._servers.clear()

    def go_on(self, open_server: Callable[[int], Server]) -> str:
        """Open round 0 after a pause; return where its clients reach it.

        Args:
            open_server: opens the server of a round from here on, by its number.
        """
        self._open_server = open_server
        return self.listen()

    def wait(self, *, stays: bool) -> None:
        """Return once the workers of all rounds have left, or `stop` was called.

        Args:
            stays: wait for `stop` though all have left: there may be another round.

        Raises:
            ServerError: what `fail` was given, or has ended a round.
        """
        with self._changed:
            # an orphan, which has a limit, is not told to stop
            while self._running or (stays and not self._stopping and self._idle_limit_s is None):
                self._changed.wait(POLL_S)
        if self._failure is not None:
            raise self._failure

    def moves(self) -> bool:
        """Return whether every round that runs has received since the last call."""
        with self._changed:
            before, self._turns = self._turns, {s: s.turns for s in self._running}
        return all(before.get(server) != turns for server, turns in self._turns.items())

    def statistics(self) -> ShardStatistics:
        """Return what all rounds have done so far. Any thread may call it."""
        with self._changed:
            running = [server.statistics() for server in self._servers]
            rounds = [asdict(one) for one in (*self._ended, *running)]
        return ShardStatistics(
            **{
                name: (max if name in OF_THIS_MOMENT else sum)(one[name] for one in rounds)
                for name in rounds[0]
            }
        )

    def stop_when_idle(self, limit_s: float) -> None:
        """Let each round end once no peer is connected, or none has sent for `limit_s` seconds.

        Any thread may call it.
        """
        with self._changed:
            self._idle_limit_s = limit_s
            for server in self._servers:
                server.stop_when_idle(limit_s)
            self._changed.notify_all()

    def failing(self, what: str) -> Callable[[Exception], None]:
        """Return what lets `wait` raise an error soon. Any thread may call it."""

        def fail(error: Exception) -> None:
            with self._changed:
                self._failure = self._failure or as_server_error(error, what)
                self.stop()

        return fail

    def stop(self) -> None:
        """Let `wait` return soon. Any thread, and the handler of a signal, may call it."""
        with self._changed:
            self._stopping = True
            for server in self._servers:
                server.stop()
            self._changed.notify_all()
