"""Requests of rank 0 with local steps, and rounds that a quorum of the workers ends, on one worker.

The shards decide whose changes count in a round (`ps_server/protocol/quorum.py`). With its changes
a worker sends the number of its finished iterations. All workers in a round continue from the
largest of these numbers, the job's: a late worker leaves out the iterations that the others have
made without it.

A slow worker that the others wait for ends its round after the local step that it makes
(`is_awaited`). So it is in time where the grace is longer than one of its local steps, and its few
records weigh little.

Laws:

* All workers take part in a collection, and in what a request of rank 0 asks for. So before a
  collection all settle, and rank 0's next changes bring its requests: that round waits for all.
* A late worker skips no such round: the others wait in it. So all workers settle, and are asked,
  after the same iteration.
* A worker that settles and has nothing to send, as its last round ended without another worker,
  sends zeros with the weight of its last changes: the late worker's count as in any round.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Container

from poseidon.exchange.job_control import JobControl
from ps_server import Client, Collection, RemoteProtocolError, Signal, SignalKind


class RoundControl(JobControl):
    """Requests of the outer exchange, whose clocks are rounds, with clocks that are iterations.

    All workers see a request before they end the round that it names (the law of the outer
    exchange's control). All end the same rounds after the same iterations. So all give a request the
    same iteration, before they end it.

    Args:
        lag: rounds by which a worker may be further ahead of the others than the outer exchange
            knows.

    Attributes:
        next_end: the iteration at whose end the next whole round ends.
    """

    def __init__(self, outer: JobControl, *, lag: int = 0) -> None:
        super().__init__(root=outer.root)
        self._outer = outer
        self._lag = lag
        self._due: dict[Signal, int] = {}
        self.next_end = 0

    def end_round(self, iteration: int, rounds: int, *, next_end: int) -> None:
        """Note that a whole round has ended, after so many iterations and rounds."""
        for signal in self._outer.requests:
            if signal.clock + self._lag <= rounds:
                self._due.setdefault(signal, iteration)
        self.next_end = next_end

    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        return self._outer.gather(payload, to)

    def _request(self, kind: SignalKind) -> None:
        self._outer.request(kind)

    @property
    def requests(self) -> tuple[Signal, ...]:
        """A request whose round has not ended has the earliest iteration that it may get."""
        return tuple(
            Signal(signal.kind, self._due.get(signal, self.next_end))
            for signal in self._outer.requests
        )


_ITERATION = struct.Struct("<q")


class QuorumRounds(JobControl):
    """The rounds of one worker, and its collections and requests.

    Attributes:
        settle: lets all workers settle; set by who makes the rounds.
        complete: whether all workers were in this worker's last round.
    """

    def __init__(self, client: Client, outer: JobControl, workers: int) -> None:
        super().__init__(root=outer.root)
        self._client = client
        self._outer = outer
        self._workers = workers
        self._lock = threading.Lock()
        self._asked: list[SignalKind] = []  # of rank 0, that no round has brought
        self._sent: list[SignalKind] = []
        self.settle: Callable[[], None] = lambda: None
        self.open()

    def open(self) -> None:
        """Begin with a round of all workers behind them."""
        self.complete = True
        self._records = self._weight = self._last_weight = 0.0
        """In this iteration, in the iterations since the last round, and in the last round."""

    @property
    def is_awaited(self) -> bool:
        """Whether a quorum of the workers waits for this one."""
        return self._client.is_awaited

    def note_records(self, count: float) -> None:
        """See `Exchange.note_records`."""
        self._records += count

    def end_iteration(self) -> None:
        """Add the records of an iteration to the weight of the changes."""
        self._weight, self._records = self._weight + (self._records or 1.0), 0.0

    def describe(self, iterations: int, *, whole: bool) -> None:
        """Describe the changes that are sent next.

        Args:
            iterations: that this worker has finished.
            whole: whether their round waits for all workers.
        """
        self._last_weight, self._weight = self._weight or self._last_weight, 0.0
        with self._lock:
            self._sent = list(self._asked)
        kinds = bytes(kind.value for kind in self._sent)
        payload = _ITERATION.pack(iterations) + kinds
        self._client.describe_part(self._last_weight, payload, whole=whole or bool(kinds))

    def end(self) -> int:
        """Wait for the round in which the changes count. Return the job's finished iterations.

        Raises:
            RemoteProtocolError: another worker has sent something else.
        """
        ended = self._client.end_round()
        reached = max(_read(payload)[0] for payload in ended.payloads)
        if ended.workers[0] == 0:
            kinds = _read(ended.payloads[0])[1]
            self._requests += tuple(Signal(kind, reached) for kind in kinds)
        with self._lock:
            del self._asked[: len(self._sent)]
        self._sent = []
        self.complete = len(ended.workers) == self._workers
        return reached

    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        self.settle()
        return self._outer.gather(payload, to)

    def _request(self, kind: SignalKind) -> None:
        with self._lock:
            self._asked.append(kind)


def _read(payload: bytes) -> tuple[int, list[SignalKind]]:
    try:
        (iterations,) = _ITERATION.unpack_from(payload)
        return iterations, [SignalKind(value) for value in payload[_ITERATION.size :]]
    except (struct.error, ValueError) as error:
        raise RemoteProtocolError(f"changes came with {payload!r:.40}") from error
