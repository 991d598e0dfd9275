"""Job control between the workers of one host (`poseidon.exchange.job_control` has the contract).

The leader joins its host to the others: the payloads of a host travel as one, and the payloads of
all come back to each worker. Requests of rank 0 reach the leader through the exchange between
hosts, and the followers through the leader.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Container, Sequence

from poseidon.exchange.job_control import Delivery, JobControl, join, split
from poseidon.exchange.local.connection import Buffer, Connection, Kind, Message, send_all
from ps_server import Collection, PeerLost, ServerError, Signal, SignalKind
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor

Send = Callable[..., None]


class _Gathered:
    """Payloads that have come, by the number of their collection; background threads bring them."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._next = 0
        self._payloads: dict[int, tuple[bytes, ...]] = {}

    def begin(self) -> int:
        """Return the number of the next collection."""
        number, self._next = self._next, self._next + 1
        return number

    def put(self, number: int, payloads: tuple[bytes, ...]) -> None:
        """Note the payloads of a collection."""
        with self._monitor:
            self._payloads[number] = payloads
            self._monitor.notify()

    def collection(self, number: int) -> Collection:
        """Return a collection that this worker has contributed to."""
        return Collection.guarded(self._monitor, lambda: self._payloads.pop(number, None))


class _HostsOf(Container[int]):
    """The hosts of some workers, by their ranks among the hosts."""

    def __init__(self, workers: Container[int], local_workers: int) -> None:
        self._workers = workers
        self._local = local_workers

    def __contains__(self, host: object) -> bool:
        assert isinstance(host, int)
        first = host * self._local
        return any(rank in self._workers for rank in range(first, first + self._local))


class LeaderDelivery(Delivery):
    """Collections are passed on in their order, whichever worker of the host contributes last.

    A request names an iteration that all leaders reach. The leader sends it to its followers before
    it announces the next value, on the same connection. A follower uses the value after it has read
    the request, so it has the request before it can end that iteration.

    Args:
        connections: to the followers, by local rank.
        failed: called with the error that ends the collections.
    """

    def __init__(
        self,
        inner: JobControl,
        connections: Sequence[Connection],
        monitor: Monitor,
        failed: Callable[[ServerError], None],
    ) -> None:
        self._inner = inner
        self._connections = connections
        self._monitor = monitor
        self._failed = failed
        self._order = threading.Lock()
        self._contributed: dict[int, dict[int, bytes]] = {}
        self._to: dict[int, Container[int] | None] = {}
        self._left: set[int] = set()
        self._under_way: queue.Queue[tuple[int, Collection] | None] = queue.Queue()
        self._gathered = _Gathered(monitor)
        self._pending: deque[SignalKind] = deque()
        self._announced: tuple[Signal, ...] = ()
        self._thread = threading.Thread(target=self._run, name="local-collections", daemon=True)
        self._thread.start()

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        number = self._gathered.begin()
        local_workers = len(self._connections) + 1
        self._to[number] = None if to is None else _HostsOf(to, local_workers)
        self.contribute(0, number, payload)
        return self._gathered.collection(number)

    def contribute(self, worker: int, number: int, payload: Buffer) -> None:
        """Take the payload of a worker of this host; pass all of them on once the last has come."""
        with self._order:
            parts = self._contributed.setdefault(number, {})
            parts[worker] = bytes(payload)
            complete = len(parts) == len(self._connections) + 1
            if complete:
                packed = join(parts[rank] for rank in sorted(parts))
                self._under_way.put((number, self._inner.gather(packed, self._to.pop(number))))
                del self._contributed[number]
        if complete:
            self._monitor.notify()
        self._check_left()

    def wait_until_passed_on(self) -> None:
        """Wait until every collection that a worker of this host has contributed to has gone to
        the other hosts.

        The leader calls it before it settles: settling may need a collection of the hosts (a
        barrier at staleness > 0), and all hosts must have the same order of collections. No worker
        contributes to a later one before the settlement ends.
        """
        self._monitor.wait_for(
            lambda: None if self._contributed else True,
            "not every worker of this machine has contributed to a collection",
        )

    def leave(self, worker: int) -> None:
        """Note that a worker has left: no collection may wait for it."""
        with self._order:
            self._left.add(worker)
        self._check_left()

    def close(self) -> None:
        """Stop, without waiting for a collection that cannot end."""
        self._under_way.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, after the job control among the hosts is closed."""
        self._thread.join()

    def _check_left(self) -> None:
        with self._order:
            missing = [self._left - parts.keys() for parts in self._contributed.values()]
        if gone := set[int]().union(*missing):
            first = min(gone)
            self._failed(PeerLost(f"worker {first} of this machine has left before a collection"))

    def _run(self) -> None:
        try:
            while (next_one := self._under_way.get()) is not None:
                number, collection = next_one
                hosts = collection.result()
                payloads = tuple(payload for packed in hosts for payload in split(packed))
                send_all(self._connections, Kind.GATHERED, join(payloads), number=number)
                self._gathered.put(number, payloads)
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self._failed(as_server_error(error, "the collections of this machine's workers failed"))

    def request(self, kind: SignalKind) -> None:
        """Note a request, which `submit` passes on."""
        with self._monitor:
            self._pending.append(kind)

    def submit(self) -> None:
        """Pass pending requests on to the other hosts: at the end of an iteration, before the
        values of the next one.
        """
        while self._pending:
            self._inner.request(self._pending.popleft())

    def announce(self) -> None:
        """Send new requests to the followers; called before each value."""
        requests = self._inner.requests
        if requests != self._announced:
            packed = json.dumps([[signal.kind.value, signal.clock] for signal in requests])
            send_all(self._connections, Kind.SIGNALS, packed.encode())
            self._announced = requests

    @property
    def requests(self) -> tuple[Signal, ...]:
        return self._inner.requests


class FollowerDelivery(Delivery):
    """`LeaderDelivery` proves that a request comes in time."""

    def __init__(self, send: Send, monitor: Monitor) -> None:
        self._send = send
        self._gathered = _Gathered(monitor)
        self._requests: tuple[Signal, ...] = ()

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        number = self._gathered.begin()  # the leader, which has the same `to`, passes it on
        self._send(Kind.GATHER, payload, number=number)
        return self._gathered.collection(number)

    def request(self, kind: SignalKind) -> None:
        raise AssertionError("rank 0 is a leader")

    @property
    def requests(self) -> tuple[Signal, ...]:
        return self._requests

    def receive(self, message: Message) -> None:
        """Take requests or a collection from the leader."""
        if message.kind is Kind.SIGNALS:
            signals = json.loads(message.payload)
            self._requests = tuple(Signal(SignalKind(kind), clock) for kind, clock in signals)
        else:
            self._gathered.put(message.number, tuple(split(message.payload)))
