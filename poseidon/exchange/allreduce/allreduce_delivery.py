"""Job control of an all-reduce job: collections through the store of the
rendezvous, requests with the sums of training.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.exchange.allreduce.process_group import Rendezvous, dist, torch_errors
from poseidon.exchange.job_control import KINDS, Delivery
from ps_server import (
    Collection,
    LocalProtocolError,
    PeerLeft,
    PeerLost,
    Signal,
    SignalKind,
    StalenessTimeout,
)
from ps_server.network import Network

PIECE_BYTES = 2**22
"""Of a payload in one value of the store, which refuses more than 8 MiB."""
COUNT_BYTES = 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.02
"""Between two looks at a collection that is not complete. The store's own wait
would hold up the calls of other threads.
"""
LINGER_S = 30.0
"""How long rank 0, whose process has the store, waits at most for others to read what is
complete before it leaves.
"""


class StoreCollections:
    """The collections that one worker takes part in.

    They are numbered in the order in which it contributes.

    Each worker writes its payload to the store and then counts itself: a collection is complete
    when all have. Each counts itself again when it has read all payloads, and the last one deletes
    them. A worker that leaves writes how many collections it has contributed to, and how many
    iterations it has finished, so that no other waits for it.

    Args:
        rendezvous: has the store.
        network: of the workers.
    """

    def __init__(self, rendezvous: Rendezvous, network: Network) -> None:
        self._store = dist.PrefixStore("collections", rendezvous.store)
        self._rank, self._workers = network.rank, network.size
        self._timeout_s = network.timeout_s
        self._lock = threading.Lock()
        self._next = 0
        self._unread: set[int] = set()
        self._stored: deque[int] = deque()
        self._closed = threading.Event()

    def contribute(self, payload: bytes) -> Collection:
        """Contribute to the next collection."""
        with self._calling():
            while self._stored and not self._store.check([f"{self._stored[0]}/written"]):
                self._stored.popleft()
            number, self._next = self._next, self._next + 1
            self._stored.append(number)
            self._unread.add(number)
            self._write(f"{number}/{self._rank}", payload)
            self._store.add(f"{number}/written", 1)
        found: tuple[bytes, ...] | None = None

        def poll() -> tuple[bytes, ...] | None:
            nonlocal found
            if found is None:
                with self._calling():
                    found = self._take(number)
            return found

        return Collection(poll, lambda: self._wait(poll))

    def leave(self, iterations: int) -> None:
        """Leave the job after so many iterations: when this returns, all others can see it.

        Safe to call twice.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        with (
            contextlib.suppress(PeerLost),
            self._lock,
            torch_errors("leave"),
        ):  # rank 0 may have gone
            self._store.set(f"left/{self._rank}", f"{self._next} {iterations}")
            for number in self._unread:
                self._store.add(f"{number}/read", 1)
            self._store.add("left", 1)

    def close(self) -> None:
        """Let the others read what is complete, on rank 0, whose process has the store.

        Call it after `leave`.
        """
        deadline_s = time.monotonic() + LINGER_S
        with contextlib.suppress(PeerLost), torch_errors("leave"):
            while self._rank == 0 and self._has_readers() and time.monotonic() < deadline_s:
                time.sleep(LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        with self._lock, torch_errors("gather"):
            if self._closed.is_set():
                raise LocalProtocolError("the exchange is closed")
            yield

    def _wait(self, poll: Callable[[], tuple[bytes, ...] | None]) -> tuple[bytes, ...]:
        deadline_s = time.monotonic() + self._timeout_s
        pause_s = FIRST_PAUSE_S
        while (found := poll()) is None:
            if time.monotonic() >= deadline_s:
                raise StalenessTimeout(
                    f"not every worker has contributed to a collection within {self._timeout_s:g} "
                    "s: a worker hangs"
                )
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return found

    def _write(self, key: str, payload: bytes) -> None:
        """Write a payload in pieces; the first value begins with the number of the others."""
        pieces = [
            payload[at : at + PIECE_BYTES] for at in range(PIECE_BYTES, len(payload), PIECE_BYTES)
        ]
        for place, piece in enumerate(pieces):
            self._store.set(f"{key}/{place}", piece)
        self._store.set(key, len(pieces).to_bytes(COUNT_BYTES, "big") + payload[:PIECE_BYTES])

    def _take(self, number: int) -> tuple[bytes, ...] | None:
        """Read a collection, and delete it if all others have read it; None while it is not
        complete.
        """
        if self._store.add(f"{number}/written", 0) < self._workers:
            self._check_left(lambda contributed, _: contributed <= number)
            return None
        keys = [f"{number}/{rank}" for rank in range(self._workers)]
        payloads = []
        for key, first in zip(tuple(keys), self._store.multi_get(keys), strict=True):
            others = [
                f"{key}/{place}" for place in range(int.from_bytes(first[:COUNT_BYTES], "big"))
            ]
            payloads.append(
                b"".join((first[COUNT_BYTES:], *(self._store.get(other) for other in others)))
            )
            keys += others
        self._unread.discard(number)
        if self._store.add(f"{number}/read", 1) == self._workers:
            for key in (*keys, f"{number}/written", f"{number}/read"):
                self._store.delete_key(key)
        return tuple(payloads)

    def check_left(self, iterations: int) -> None:
        """Raise `PeerLeft` if a worker has left after at most so many iterations."""
        with torch_errors("train"):
            self._check_left(lambda _, finished: finished <= iterations)

    def _check_left(self, is_behind: Callable[[int, int], bool]) -> None:
        """Raise `PeerLeft` if a worker has left whose contributions and iterations are too few."""
        if not self._store.check(["left"]):
            return
        for rank in range(self._workers):
            key = f"left/{rank}"
            if not self._store.check([key]):
                continue
            contributed, finished = map(int, self._store.get(key).split())
            if is_behind(contributed, finished):
                raise PeerLeft(rank, finished, rank=self._rank)

    def _has_readers(self) -> bool:
        return any(
            self._store.add(f"{number}/written", 0) == self._workers
            and self._store.add(f"{number}/read", 0) < self._workers
            for number in self._stored
        )


class AllReduceDelivery(Delivery):
    """Job control of replicas without shards. Requests travel with the training itself.

    Each iteration sums how often rank 0 has requested each kind: all other workers contribute
    zeros. So all workers see a request at the end of the same iteration, and the request names the
    next one: a worker that passes values on to others of its host (`local/host_delivery.py`) has
    time to send them the request.

    Args:
        collections: of this worker.
    """

    def __init__(self, collections: StoreCollections) -> None:
        self._collections = collections
        self._lock = threading.Lock()
        self._requested = [0] * len(KINDS)
        self._sum = torch.zeros(len(KINDS), dtype=torch.float32, device="cpu")
        self._seen = [0] * len(KINDS)
        self._finish_sum: Callable[[], None] | None = None
        self._requests: tuple[Signal, ...] = ()

    def gather(self, payload: bytes) -> Collection:
        return self._collections.contribute(payload)

    def request(self, kind: SignalKind) -> None:
        with self._lock:
            self._requested[KINDS.index(kind)] += 1

    @property
    def requests(self) -> tuple[Signal, ...]:
        return self._requests

    def start(self, start_sum: Callable[[Tensor], Callable[[], None]]) -> None:
        """Start the sum of an iteration.

        Args:
            start_sum: starts the sum of a tensor over all workers, in place, and returns what waits
                for it.
        """
        with self._lock:
            for place, count in enumerate(self._requested):
                self._sum[place] = count
        self._finish_sum = start_sum(self._sum)

    def finish(self, clock: int) -> None:
        """Wait for the sum of the iteration; what is new in it is to be done after `clock`
        iterations.
        """
        assert self._finish_sum is not None, "the iteration has not started"
        self._finish_sum()
        counts = [int(count) for count in self._sum.tolist()]
        for kind, before, now in zip(KINDS, self._seen, counts, strict=True):
            self._requests += (Signal(kind, clock),) * (now - before)
        self._seen = counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the replicas of a job without shards meet.

    Attributes:
        rendezvous: has the store.
        collections: of this replica, through the store.
        delivery: of the job control of this replica.
    """

    rendezvous: Rendezvous
    collections: StoreCollections
    delivery: AllReduceDelivery

    @classmethod
    def at(cls, rendezvous: Rendezvous, network: Network) -> Meeting:
        """Return the meeting of this process at a rendezvous."""
        collections = StoreCollections(rendezvous, network)
        delivery = AllReduceDelivery(collections)
        return cls(rendezvous=rendezvous, collections=collections, delivery=delivery)
