"""How the workers of a machine take part in collections as one: their payloads travel as one and come back as all.

Law: collections are passed on in their order, whoever of the machine contributes last.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from poseidon.exchange.base import Ask, Exchange
from poseidon.exchange.local.group import pack, unpack
from poseidon.exchange.local.line import Kind, Line, tell
from poseidon.exchange.local.siblings import Siblings
from ps_server import PeerLost, ServerError


class Meetings:
    """The leader's side of all collections.

    Args:
        inner: collects over the machines.
        lines: of the other workers, by local rank.
        siblings: the shared state.
        failed: told why collections cannot go on.
    """

    def __init__(
        self,
        inner: Exchange,
        lines: Sequence[Line],
        siblings: Siblings,
        failed: Callable[[ServerError], None],
    ) -> None:
        self._inner = inner
        self._lines = lines
        self._siblings = siblings
        self._failed = failed
        self._order = threading.Lock()
        self._waiting: dict[int, dict[int, bytes]] = {}
        self._left: set[int] = set()
        self._asked = 0
        self._asks: queue.Queue[tuple[int, Ask] | None] = queue.Queue()
        self._gathered: dict[int, tuple[bytes, ...]] = {}
        self._thread = threading.Thread(target=self._run, name="local-meetings", daemon=True)
        self._thread.start()

    def ask(self, payload: bytes) -> Ask:
        """The leader's own contribution to its next collection."""
        tag = self._asked
        self._asked += 1
        self.contribute(0, tag, payload)
        kept: list[tuple[bytes, ...]] = []

        def collected() -> tuple[bytes, ...] | None:
            with self._siblings.changed:
                if tag in self._gathered:
                    kept.append(self._gathered.pop(tag))
                if not kept:
                    self._siblings.check()
                return kept[0] if kept else None

        return collected

    def contribute(self, worker: int, tag: int, payload: bytes | bytearray) -> None:
        """A worker's contribution; the last one of a machine sends all of them on."""
        with self._order:
            parts = self._waiting.setdefault(tag, {})
            parts[worker] = bytes(payload)
            if len(parts) == len(self._lines) + 1:
                del self._waiting[tag]
                packed = pack([parts[rank] for rank in sorted(parts)])
                self._asks.put((tag, self._inner.gather(packed)))
        self._check_left()

    def leave(self, worker: int) -> None:
        """A worker has left; there must be no collection that waits for it."""
        with self._order:
            self._left.add(worker)
        self._check_left()

    def close(self) -> None:
        """Stop, without waiting for a collection that cannot end."""
        self._asks.put(None)

    def _check_left(self) -> None:
        with self._order:
            missed = sorted(self._left - parts.keys() for parts in self._waiting.values())
        gone = sorted(set().union(*missed))
        if gone:
            self._failed(PeerLost(f"worker {gone[0]} of this machine has left before a meeting"))

    def _run(self) -> None:
        while (asked := self._asks.get()) is not None:
            tag, ask = asked
            try:
                machines = self._inner.gathered(ask)
                payloads = tuple(payload for packed in machines for payload in unpack(packed))
                tell(self._lines, Kind.GATHERED, pack(payloads), number=tag)
            except ServerError as error:
                self._failed(error)
                return
            with self._siblings.changed:
                self._gathered[tag] = payloads
                self._siblings.changed.notify_all()
