"""Job control: collections of small payloads among all workers, and rank 0's requests to all of
them.

There is a `JobControl` for each way in which workers are connected:

    AloneControl         one worker
    ShardControl         through the shards of the parameter server
    LinksControl         without shards, over the connections that sum gradients

Law: all workers see a request before they end the iteration that it names, so they all act on it
after the same one. Each class says why this holds for it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from poseidon.exchange.peers import Gatherings, Peers
from ps_server import (
    Client,
    Collection,
    LocalProtocolError,
    RemoteProtocolError,
    Signal,
    SignalKind,
)
from ps_server.transport.base import Buffer

SAME_CALLS = "all workers must make the same calls in the same order"
"""The end of an error's sentence, where workers make different calls."""


class JobControl(ABC):
    """Collections among all workers, and requests of rank 0.

    Args:
        root: whether this is rank 0, the only one that may request.
        ranks: of the workers in the job; empty: they are all of it.

    Attributes:
        around_wait: entered around each wait for a collection.
    """

    def __init__(self, *, root: bool, ranks: Sequence[int] = ()) -> None:
        self.root = root
        self.ranks = ranks
        self.around_wait: Callable[[], AbstractContextManager[None]] = nullcontext
        self._requests: tuple[Signal, ...] = ()

    @abstractmethod
    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        """See `gather`."""

    @abstractmethod
    def _request(self, kind: SignalKind) -> None:
        """See `request`."""

    @property
    def requests(self) -> tuple[Signal, ...]:
        """The requests of rank 0 that this worker has received so far.

        `clock` of each is the number of finished iterations to do it at.
        """
        return self._requests

    def await_requests(self, count: int) -> None:
        """Wait until this worker has received so many, which another worker of its host has."""
        return

    def start(self, iteration: int) -> None:
        """Note that an iteration starts, before any gradient of it, or that it will be the next."""
        return

    def finish(self, iteration: int) -> None:
        """Note that an iteration has ended."""
        return

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        """Contribute to the next collection, and return at once.

        All workers take part in each collection, in the same order. `Collection.poll` and
        `Collection.result` give the payloads of all workers by rank.

        Args:
            to: the ranks that need the payloads, the same on all workers: others may get none.
                None: all.
        """
        collection = self._gather(payload, to)

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
        self._request(kind)

    def is_asked_to_stop(self, iterations: int) -> bool:
        """Return whether a stop was requested for the end of one of the finished iterations."""
        return any(r.kind is SignalKind.STOP and r.clock <= iterations for r in self.requests)

    def is_asked_for_snapshot(self, iterations: int) -> bool:
        """Return whether a snapshot was requested for the end of the last finished iteration."""
        return any(r.kind is SignalKind.SNAPSHOT and r.clock == iterations for r in self.requests)

    def is_asked_to_regroup(self, iterations: int) -> bool:
        """Return whether a regroup was requested for the end of one of the finished iterations."""
        return any(r.kind is SignalKind.REGROUP and r.clock <= iterations for r in self.requests)


class AloneControl(JobControl):
    """Job control of one worker: its own payload is the collection.

    A request is for the end of the iteration under way or, after it, of the next one. Requests come
    from any thread: one that reads the clock of an iteration is in `requests` before `finish`
    returns, so the loop sees it there.
    """

    def __init__(self, *, root: bool = True, ranks: Sequence[int] = ()) -> None:
        super().__init__(root=root, ranks=ranks)
        self._lock = threading.Lock()
        self._clock = 0

    def start(self, iteration: int) -> None:
        with self._lock:
            self._clock = iteration + 1

    def finish(self, iteration: int) -> None:
        self.start(iteration + 1)

    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        return Collection.here((payload,))

    def _request(self, kind: SignalKind) -> None:
        with self._lock:
            self._requests += (Signal(kind, self._clock),)


class ShardControl(JobControl):
    """Job control through the shards.

    `Session.signal` of the store proves that every worker sees a request in time: each shard passes
    it on before any value that depends on a later push of rank 0.

    Args:
        whole: whether collections are of all workers of the job; otherwise of a plane, whose
            workers have the ranks of their hosts.
    """

    def __init__(self, client: Client, *, whole: bool = True, ranks: Sequence[int] = ()) -> None:
        self._rank = client.rank if whole else client.host
        super().__init__(root=self._rank == 0, ranks=ranks)
        self._client = client
        self._whole = whole

    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        keeps = to is None or self._rank in to
        return self._client.gather(payload, keeps=keeps, whole=self._whole)

    def _request(self, kind: SignalKind) -> None:
        self._client.signal(kind)

    @property
    def requests(self) -> tuple[Signal, ...]:
        return self._client.signals

    def await_requests(self, count: int) -> None:
        self._client.await_signals(count)


KINDS = [kind.value for kind in SignalKind]


class LinksControl(JobControl):
    """Collections and requests between all workers.

    Each worker sends its contribution to every other one.

    A request leaves when rank 0 starts an iteration t, and names the end of iteration t + 1. No
    worker ends that iteration without the means of iteration t, and rank 0 has a slice of each of
    them, which it sends after the request, on the same connection. So every worker has the request
    before it ends iteration t + 1. Among the workers of a host rank 0 sends it before it contributes
    to iteration t (`host/carrier.py` has the rest of the proof).
    """

    def __init__(self, peers: Peers, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(root=peers.rank == 0, ranks=ranks)
        self._peers = peers
        self._collections = Gatherings(peers, "Gather", partial(peers.check_left, -1))
        self._pending: deque[SignalKind] = deque()
        peers.on("Request", 2, self._note_request)

    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        return self._collections.gather(payload, to)

    def _request(self, kind: SignalKind) -> None:
        with self._peers.monitor:
            self._pending.append(kind)

    def await_requests(self, count: int) -> None:
        self._peers.monitor.wait_for(
            lambda: True if len(self._requests) >= count else None,
            "a request of worker 0 did not come",
        )

    def start(self, iteration: int) -> None:
        peers = self._peers
        with peers.monitor:
            while self._pending:
                signal = Signal(self._pending.popleft(), iteration + 2)
                self._requests += (signal,)
                if peers.others:
                    fields = signal.kind.value, signal.clock
                    peers.send(peers.others, "Request", *fields, payload=b"")

    def _note_request(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        kind, clock = fields
        if sender or kind not in KINDS:
            raise RemoteProtocolError("a request came that it may not send")
        self._requests += (Signal(SignalKind(kind), clock),)
