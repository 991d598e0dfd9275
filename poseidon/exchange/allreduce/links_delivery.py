"""Job control of a job without shards, over the connections that sum its gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

from poseidon.exchange.job_control import Delivery
from poseidon.exchange.peers import Peers
from ps_server import Collection, RemoteProtocolError, Signal, SignalKind
from ps_server.transport.base import Buffer

KINDS = [kind.value for kind in SignalKind]


class LinksDelivery(Delivery):
    """Collections and requests between all workers.

    Each worker sends its contribution to every other one.

    A request leaves when rank 0 starts an iteration t, and names the end of iteration t + 1. No
    worker ends that iteration without the means of iteration t, and rank 0 has a slice of each of
    them, which it sends after the request, on the same connection. So every worker has the request
    before it ends iteration t + 1. Among the workers of a host rank 0 sends it before it contributes
    to iteration t (`host/carrier.py` has the rest of the proof).
    """

    def __init__(self, peers: Peers[Any]) -> None:
        self._peers = peers
        self._next = 0
        self._came = [0] * peers.size
        self._payloads: dict[int, dict[int, bytes]] = {}
        self._pending: deque[SignalKind] = deque()
        self._requests: tuple[Signal, ...] = ()
        peers.on("Gather", 1, self._take)
        peers.on("Request", 2, self._note_request)

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        peers = self._peers
        targets = peers.others if to is None else [rank for rank in peers.others if rank in to]
        with peers.monitor:
            number, self._next = self._next, self._next + 1
            if targets:
                peers.send(targets, "Gather", number, payload=payload)
            self._payloads.setdefault(number, {})[peers.rank] = payload
        peers.links.wake()

        if to is not None and peers.rank not in to:
            del self._payloads[number]
            return Collection(lambda: (), lambda: ())

        def take() -> tuple[bytes, ...] | None:
            found = self._payloads[number]
            missing = [rank for rank in range(peers.size) if rank not in found]
            if missing:
                peers.check_left(-1, missing)
                return None
            del self._payloads[number]
            return tuple(found[rank] for rank in range(peers.size))

        return Collection.guarded(peers.monitor, take)

    def request(self, kind: SignalKind) -> None:
        with self._peers.monitor:
            self._pending.append(kind)

    @property
    def requests(self) -> tuple[Signal, ...]:
        return self._requests

    def await_requests(self, count: int) -> None:
        self._peers.monitor.wait_for(
            lambda: True if len(self._requests) >= count else None,
            "a request of worker 0 did not come",
        )

    def start(self, iteration: int) -> None:
        """Send the requests of rank 0, before any gradient of an iteration."""
        peers = self._peers
        with peers.monitor:
            while self._pending:
                signal = Signal(self._pending.popleft(), iteration + 2)
                self._requests += (signal,)
                if peers.others:
                    fields = signal.kind.value, signal.clock
                    peers.send(peers.others, "Request", *fields, payload=b"")

    def _take(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        (number,) = fields
        if number < self._came[sender]:
            raise RemoteProtocolError(f"worker {sender} contributes to a collection out of turn")
        self._came[sender] = number + 1  # in between are those for others
        self._payloads.setdefault(number, {})[sender] = bytes(payload)

    def _note_request(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        kind, clock = fields
        if sender or kind not in KINDS:
            raise RemoteProtocolError(f"worker {sender} sends a request that it may not send")
        self._requests += (Signal(SignalKind(kind), clock),)
