"""The rounds in which workers sum buckets: what may come from whom. A state machine without I/O.

A round of a bucket, on each worker:

    begin      its own parts of the bucket leave, one for each of its nodes of the tree
    take_part  as the owner of a slice: each part comes once, then the mean of the slice leaves
    take_mean  the mean of each slice comes from its owner once, and the round ends

In a round of values rank 0 alone sends: each owner gets its slice and sends it on as it is.

Law: a worker begins a round when its last one has ended. The mean of an owner has a part of every
worker, so no part of the next round comes before an owner has sent its mean, and no mean before a
worker has begun: a message that comes at another time is not legal. Before a round of values all
workers wait for each other.
"""

from __future__ import annotations

from poseidon.exchange.allreduce.buckets import Buckets
from ps_server import RemoteProtocolError
from ps_server.protocol.virtual_workers import Node, VirtualWorkers


class _Bucket:
    """The state of one bucket on one worker."""

    __slots__ = ("adding", "coming", "copied", "parts", "round")

    def __init__(self, parts: set[tuple[int, int]]) -> None:
        self.round = -1
        """This worker's last round."""
        self.coming: set[int] = set()
        """The owners whose mean of it has not come."""
        self.copied = 0
        """Means that are not in place yet; 0: the round has ended."""
        self.adding = 0
        """The round whose parts this worker adds."""
        self.parts = parts
        """The parts of it that have not come: the sender, and the number of its node."""


class SumRounds:
    """The rounds of all buckets on one worker."""

    def __init__(self, rank: int, workers: VirtualWorkers, buckets: Buckets) -> None:
        self._rank = rank
        self._layout = buckets
        self._nodes = [workers.nodes(process) for process in range(workers.processes)]
        self._all = {(p, k) for p, nodes in enumerate(self._nodes) for k in range(len(nodes))}
        self._buckets = [_Bucket(set(self._all)) for _ in range(len(buckets))]

    def begin(self, bucket: int) -> int:
        """Begin the next round of a bucket; return its number."""
        state = self._buckets[bucket]
        assert not state.copied, "the last round has not ended"
        owners = self._layout.owners(bucket)
        state.round, state.coming, state.copied = state.round + 1, set(owners), len(owners)
        return state.round

    def round(self, bucket: int) -> int:
        """Return the number of this worker's last round of a bucket."""
        return self._buckets[bucket].round

    def has_ended(self, bucket: int) -> bool:
        """Return whether the means of the last round are in place."""
        return not self._buckets[bucket].copied

    def take_part(self, sender: int, bucket: int, round_: int, number: int) -> Node:
        """Take a worker's part of this worker's slice; return the node whose sum it is.

        Args:
            number: of the node among the sender's.

        Raises:
            RemoteProtocolError: it may not come now.
        """
        state = self._of(sender, bucket)
        if round_ != state.adding or (sender, number) not in state.parts:
            raise RemoteProtocolError(f"worker {sender} sends a part that is not due")
        state.parts.discard((sender, number))
        if not state.parts:
            self._advance(state)
        return self._nodes[sender][number]

    def take_values(self, sender: int, bucket: int, round_: int) -> None:
        """Take rank 0's values of this worker's slice.

        Raises:
            RemoteProtocolError: they may not come now.
        """
        state = self._of(sender, bucket)
        if sender or round_ != state.adding or state.parts != self._all:
            raise RemoteProtocolError(f"worker {sender} sends values that are not due")
        self._advance(state)

    def take_mean(self, owner: int, bucket: int, round_: int) -> slice:
        """Take the mean of a slice from its owner; return its place. `put` follows.

        Raises:
            RemoteProtocolError: it may not come now.
        """
        state = self._of(owner, bucket)
        if round_ != state.round or owner not in state.coming:
            raise RemoteProtocolError(f"worker {owner} sends a mean that is not due")
        state.coming.discard(owner)
        return self._layout.slices[bucket][owner]

    def put(self, bucket: int) -> bool:
        """Note that a mean is in place; return whether the round has ended."""
        self._buckets[bucket].copied -= 1
        return not self._buckets[bucket].copied

    def missing(self, bucket: int) -> list[int]:
        """Return the other workers of whom a message of the round under way has not come."""
        state = self._buckets[bucket]
        senders = {sender for sender, _ in state.parts} if state.adding == state.round else set()
        return sorted((senders | state.coming) - {self._rank})

    def _advance(self, state: _Bucket) -> None:
        state.adding, state.parts = state.adding + 1, set(self._all)

    def _of(self, sender: int, bucket: int) -> _Bucket:
        if not 0 <= bucket < len(self._buckets):
            raise RemoteProtocolError(f"worker {sender} names a bucket that is not there")
        return self._buckets[bucket]
