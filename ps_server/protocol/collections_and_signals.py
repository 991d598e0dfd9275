"""Job control of the protocol: collections among all workers or those of a plane, and signals of
rank 0 to all workers.

Each part has two halves, one on a worker and one on a shard. All collections go through shard 0; a
signal goes through every shard (`Session.signal` says why).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m

MAX_OPEN_GATHERS = 1024
"""Collections that some workers may be ahead of others."""


class WorkerCollections:
    """The collections of one group of workers that a worker takes part in.

    They are numbered in the order in which it contributes.

    Args:
        workers: number of workers of the group.
        whole: whether these are all workers.
    """

    def __init__(self, workers: int, *, whole: bool = True) -> None:
        self._workers = workers
        self._whole = whole
        self._next_tag = 0
        self._awaited: dict[int, int] = {}
        """The number of payloads that will come, by collection."""
        self._gathered: dict[int, tuple[bytes, ...]] = {}

    def contribute(self, payload: bytes, *, keeps: bool = True) -> m.Gather:
        """Contribute to the next collection.

        Args:
            payload: the contribution.
            keeps: whether this worker needs the payloads; otherwise it gets none.
        """
        tag = self._next_tag
        self._next_tag += 1
        self._awaited[tag] = self._workers if keeps else 0
        return m.Gather(tag, payload, keeps, self._whole)

    def expects(self, gathered: m.Gathered) -> bool:
        """Return whether the shard may send this now."""
        return self._awaited.get(gathered.tag) == len(gathered.payloads)

    def receive(self, gathered: m.Gathered) -> None:
        """Take a collection that is complete."""
        del self._awaited[gathered.tag]
        self._gathered[gathered.tag] = gathered.payloads

    def take(self, tag: int) -> tuple[bytes, ...] | None:
        """Return the payloads of a collection by rank, once; None while it is not complete."""
        return self._gathered.pop(tag, None)


class ShardCollections:
    """The collections of one group of workers on shard 0, and how many contributions each worker
    has made.

    Args:
        workers: the ranks of the group, in order.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._open: dict[int, dict[int, m.Gather]] = {}
        self._next_tag = dict.fromkeys(workers, 0)

    def behind(self, rank: int, other: int) -> bool:
        """Return whether a worker has contributed to fewer collections than another one, and both
        are of the group.
        """
        tags = self._next_tag
        return rank in tags and other in tags and tags[rank] < tags[other]

    def contribute(self, rank: int, gather: m.Gather) -> Mapping[int, m.Gathered]:
        """Take a worker's contribution. Return what each worker gets, if it is the last one.

        Raises:
            RemoteProtocolError: it is not the worker's next collection, or the worker is too far
                ahead.
        """
        if gather.tag != self._next_tag[rank]:
            raise RemoteProtocolError(
                f"worker {rank} gathers {gather.tag}; expected {self._next_tag[rank]}"
            )
        if gather.tag not in self._open and len(self._open) >= MAX_OPEN_GATHERS:
            raise RemoteProtocolError(f"worker {rank} is {MAX_OPEN_GATHERS} collections ahead")
        self._next_tag[rank] += 1
        parts = self._open.setdefault(gather.tag, {})
        parts[rank] = gather
        if len(parts) < len(self._next_tag):
            return {}
        del self._open[gather.tag]
        payloads = tuple(parts[worker].payload for worker in self._next_tag)
        found = m.Gathered(gather.tag, payloads, gather.whole)
        nothing = m.Gathered(gather.tag, (), gather.whole)
        return {worker: found if parts[worker].keeps else nothing for worker in self._next_tag}


class WorkerSignals:
    """The signals that one worker has sent or received, each once, in their order.

    Each shard answers `Hello`, and each `Create` but the first, with `Welcome`. So the number of
    them says which session a signal of the shard belongs to.

    Args:
        rank: of the worker.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._welcomes: Counter[int] = Counter()
        self._needed = 0
        self.all: list[m.Signal] = []

    def renewed(self) -> WorkerSignals:
        """Return the signals of the next session on the same connections: none so far."""
        signals = WorkerSignals(self._rank)
        signals._welcomes = self._welcomes
        signals._needed = max(1, self._needed) + 1
        return signals

    def send(self, kind: m.SignalKind, clock: int) -> m.Signal:
        """Return rank 0's signal for all shards.

        Raises:
            LocalProtocolError: this is not rank 0.
        """
        if self._rank != 0:
            raise LocalProtocolError(f"worker {self._rank} signals; only worker 0 may")
        signal = m.Signal(kind, clock)
        self.all.append(signal)
        return signal

    def welcome(self, shard: int) -> None:
        """Note a `Welcome` of a shard."""
        self._welcomes[shard] += 1

    def receive(self, shard: int, signal: m.Signal) -> None:
        """Take a signal; every shard passes each on. One of an earlier session is ignored."""
        if self._welcomes[shard] >= self._needed and signal not in self.all:
            self.all.append(signal)
