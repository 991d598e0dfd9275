"""Job control: collections of small payloads among all workers, and rank 0's requests to all of
them.

`JobControl` is what the training loop uses. How collections and requests travel is a `Delivery`,
one for each way in which workers are connected:

    AloneDelivery        one worker
    ShardDelivery        through the shards of the parameter server
    LinksDelivery        without shards (`allreduce/links_delivery.py`)

Law: all workers see a request before they end the iteration that it names, so they all act on it
after the same one. Each delivery says why this holds for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ps_server import Client, Collection, LocalProtocolError, Signal, SignalKind

SAME_CALLS = "expected the same calls in the same order on all workers"
"""The end of an error's sentence, where workers make different calls."""


class Delivery(Protocol):
    """How collections and requests travel."""

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        """Contribute to the next collection; see `JobControl.gather`."""

    def request(self, kind: SignalKind) -> None:
        """Request something of all workers; called on rank 0."""

    @property
    def requests(self) -> tuple[Signal, ...]:
        """The requests of rank 0 that this worker has received so far."""

    def await_requests(self, count: int) -> None:
        """Wait until this worker has received so many, which another worker of its host has."""
        return


class JobControl:
    """Collections among all workers, and requests of rank 0.

    Args:
        root: whether this is rank 0, the only one that may request.

    Attributes:
        around_wait: entered around each wait for a collection.
    """

    def __init__(self, delivery: Delivery, *, root: bool) -> None:
        self.root = root
        self._delivery = delivery
        self.around_wait: Callable[[], AbstractContextManager[None]] = nullcontext

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        """Contribute to the next collection, and return at once.

        All workers take part in each collection, in the same order. `Collection.poll` and
        `Collection.result` give the payloads of all workers by rank.

        Args:
            to: the ranks that need the payloads, the same on all workers: others may get none.
                None: all.
        """
        collection = self._delivery.gather(payload, to)

        def result() -> tuple[bytes, ...]:
            with self.around_wait():
                return collection.result()

        return Collection(collection.poll, result)

    def all_gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Contribute to the next collection, and wait for the payloads of all workers by rank."""
        return self.gather(payload).result()

    def request(self, kind: SignalKind) -> None:
        """Request something of all workers, to be done at the end of an iteration that all of
        them reach.

        Raises:
            LocalProtocolError: this is not rank 0.
        """
        if not self.root:
            raise LocalProtocolError(
                f"only worker 0 may request '{kind.name.lower()}' of all workers"
            )
        self._delivery.request(kind)

    @property
    def requests(self) -> tuple[Signal, ...]:
        """The requests of rank 0 so far.

        `clock` of each is the number of finished iterations to do it at.
        """
        return self._delivery.requests

    def await_requests(self, count: int) -> None:
        """Wait until this worker has received so many requests, which another one has."""
        self._delivery.await_requests(count)

    def is_asked_to_stop(self, iterations: int) -> bool:
        """Return whether a stop was requested for the end of one of the finished iterations."""
        return any(r.kind is SignalKind.STOP and r.clock <= iterations for r in self.requests)

    def is_asked_for_snapshot(self, iterations: int) -> bool:
        """Return whether a snapshot was requested for the end of the last finished iteration."""
        return any(r.kind is SignalKind.SNAPSHOT and r.clock == iterations for r in self.requests)

    def is_asked_to_regroup(self, iterations: int) -> bool:
        """Return whether a regroup was requested for the end of one of the finished iterations."""
        return any(r.kind is SignalKind.REGROUP and r.clock <= iterations for r in self.requests)


class AloneDelivery(Delivery):
    """Job control of one worker: its own payload is the collection.

    A request is for the end of the iteration under way or, after it, of the next one. Requests come
    from any thread: one that reads the clock of an iteration is in `requests` before `advance` ends
    the iteration, so the loop sees it there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = 0
        self._requests: tuple[Signal, ...] = ()

    def advance(self, clock: int) -> None:
        """Set the number of finished iterations that requests name from now on."""
        with self._lock:
            self._clock = clock

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        return Collection(lambda: (payload,), lambda: (payload,))

    def request(self, kind: SignalKind) -> None:
        with self._lock:
            self._requests += (Signal(kind, self._clock),)

    @property
    def requests(self) -> tuple[Signal, ...]:
        return self._requests


class ShardDelivery(Delivery):
    """Job control through the shards.

    `Session.signal` of the store proves that every worker sees a request in time: each shard passes
    it on before any value that depends on a later push of rank 0.

    Args:
        whole: whether collections are of all workers of the job; otherwise of a plane, whose
            workers have the ranks of their hosts.
    """

    def __init__(self, client: Client, *, whole: bool = True) -> None:
        self._client = client
        self._whole = whole
        self._rank = client.rank if whole else client.host

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        keeps = to is None or self._rank in to
        return self._client.gather(payload, keeps=keeps, whole=self._whole)

    def request(self, kind: SignalKind) -> None:
        self._client.signal(kind)

    @property
    def requests(self) -> tuple[Signal, ...]:
        return self._client.signals

    def await_requests(self, count: int) -> None:
        self._client.await_signals(count)


def join(payloads: Iterable[bytes]) -> bytes:
    """Join several payloads into one, each after its length."""
    return b"".join(len(payload).to_bytes(8, "little") + payload for payload in payloads)


def split(joined: bytes | bytearray) -> list[bytes]:
    """Split what `join` has joined."""
    found, start = list[bytes](), 0
    while start < len(joined):
        stop = start + 8 + int.from_bytes(joined[start : start + 8], "little")
        found.append(bytes(joined[start + 8 : stop]))
        start = stop
    return found
