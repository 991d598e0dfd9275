"""The buckets in which workers sum tensors, and the rounds of each bucket: what may come from whom. A
state machine without I/O.

The tensors lie in one flat memory. It is cut into buckets of one size, and each bucket into a slice for
each worker. The layout follows from the sizes of the tensors and the number of workers alone, so it is
the same on every worker. Rank 0 has a slice of every bucket; a bucket with fewer elements than workers
has none for the last workers.

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

from collections.abc import Mapping
from itertools import accumulate, pairwise

from ps_server import RemoteProtocolError
from ps_server.protocol.virtual_workers import Node, VirtualWorkers

SLICE_BYTES = 4 * 2**20
"""A worker's slice of a bucket at most: large enough that the cost of a message does not count."""
LEAST_BYTES = 2**20
BUCKETS = 6
"""At least, where they are not smaller than `LEAST_BYTES`: one bucket is summed while the next ones
travel, and the first leaves while the gradients of others are computed.
"""
FLOAT_BYTES = 4


class Buckets:
    """The layout.

    Args:
        sizes: elements of each tensor, by index, in the order in which their gradients come.
        workers: P, the number of workers.
        bucket_bytes: of each bucket but the last; None: see `bytes_of_buckets`.

    Attributes:
        elements: of the flat memory.
        places: of each tensor in it.
        tensors: for each bucket the tensors that it has a part of.
        of: for each tensor the numbers of the buckets that it lies in.
        slices: for each bucket each worker's slice of the flat memory.
    """

    def __init__(
        self, sizes: Mapping[int, int], workers: int, bucket_bytes: int | None = None
    ) -> None:
        ends = list(accumulate(sizes.values()))
        self.elements = ends[-1] if ends else 0
        self.places = {
            index: slice(end - size, end)
            for (index, size), end in zip(sizes.items(), ends, strict=True)
        }
        if bucket_bytes is None:
            bucket_bytes = bytes_of_buckets(self.elements, workers)
        step = max(1, bucket_bytes // FLOAT_BYTES)
        bounds = [*range(0, self.elements, step), self.elements]
        self.of = {
            index: range(place.start // step, -(-place.stop // step))
            for index, place in self.places.items()
        }
        self.tensors: list[list[int]] = [[] for _ in bounds[1:]]
        for index, buckets in self.of.items():
            for bucket in buckets:
                self.tensors[bucket].append(index)
        self.slices = [_cut(start, stop, workers) for start, stop in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self.slices)

    def owners(self, bucket: int) -> list[int]:
        """Return the workers that have a slice of a bucket."""
        return [rank for rank, own in enumerate(self.slices[bucket]) if own.stop > own.start]

    def shared(self, index: int, bucket: int) -> int:
        """Return how many elements of a bucket are a tensor's."""
        place, slices = self.places[index], self.slices[bucket]
        shared = min(place.stop, slices[-1].stop) - max(place.start, slices[0].start)
        return int(shared)


def bytes_of_buckets(elements: int, workers: int) -> int:
    """Return the bytes of each bucket but the last."""
    size = SLICE_BYTES * workers
    while size > LEAST_BYTES and elements * FLOAT_BYTES < BUCKETS * size:
        size //= 2
    return size


def _cut(start: int, stop: int, parts: int) -> list[slice]:
    """Cut a range into parts of equal size; the first have one element more where it does not
    divide.
    """
    size, more = divmod(stop - start, parts)
    bounds = [start + part * size + min(part, more) for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


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
            raise RemoteProtocolError("a part came that is not due")
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
            raise RemoteProtocolError("values came that are not due")
        self._advance(state)

    def take_mean(self, owner: int, bucket: int, round_: int) -> slice:
        """Take the mean of a slice from its owner; return its place. `put` follows.

        Raises:
            RemoteProtocolError: it may not come now.
        """
        state = self._of(owner, bucket)
        if round_ != state.round or owner not in state.coming:
            raise RemoteProtocolError("a mean came that is not due")
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
            raise RemoteProtocolError("a message names an unknown bucket")
        return self._buckets[bucket]
