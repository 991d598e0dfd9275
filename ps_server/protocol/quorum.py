"""Rounds that a quorum of the workers ends: whose parts count in which round.

A state machine without I/O, in two halves. A worker's part of a round is what it has pushed since
it last had values, to all tables.

    worker      pushes its part, then sends `Part` to every shard but shard 0
    shard       answers `Taken`: it has all pushes before the `Part`
    worker      has `Taken` of all of them, and sends `Part` to shard 0
    shard 0     has the parts of a quorum, and sends `Awaited` to each worker that has none
    shard 0     decides, and sends `Round` to every worker, also to one whose part is not in it
    worker      passes `Round` on to every other shard, which ignores all but the first

Laws:

* One place decides: shard 0. So all tensors have the same parts in a round.
* A round has only parts that are whole on all shards. So a worker that stops holds up no round.
* A round ends when all workers have a part in it; or when so many as `needed` have, the grace since
  then has passed, and no part asks for all workers (`Part.whole`).
* A worker that is `Awaited` may end its part at once: it is in time if the grace is longer than it
  takes to send. So a slow worker has a part, of less weight, in each round.
* A part that comes too late counts in the next round. A worker has one part in a round: it gets
  values, and continues, when its part has counted, so all workers in a round have equal values.
* Parts are averaged by their weights, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m


class ShardRounds:
    """The decision on shard 0; on others the rounds that it has decided.

    Args:
        workers: number of workers.
        needed: workers that end a round; 1 to all.
        grace_s: seconds to wait for others after that.
        clock: of the values that the first round begins with.

    Attributes:
        clock: of the round that is open.
    """

    def __init__(self, workers: int, needed: int, grace_s: float, clock: int) -> None:
        self.clock = clock
        self._workers = workers
        self._needed = needed
        self._grace_s = grace_s
        self._parts: dict[int, m.Part] = {}
        self._since_s: float | None = None  # when so many as needed had a part in the round
        self._noticed = False  # whether the others have been told so

    def add(self, rank: int, part: m.Part) -> None:
        """Take a worker's part, which is whole on all shards.

        Raises:
            RemoteProtocolError: the worker has a part in the open round.
        """
        if rank in self._parts:
            raise RemoteProtocolError(f"worker {rank} has a part in round {self.clock} already")
        self._parts[rank] = part

    def decide(self, now_s: float) -> m.Round | None:
        """End the round if it may end now, and open the next one.

        Args:
            now_s: the seconds of a clock that is never set.
        """
        if len(self._parts) >= self._needed and self._since_s is None:
            self._since_s = now_s
        wait_s = self.wait_s(now_s)
        if wait_s is None or wait_s > 0:
            return None
        ranks = tuple(sorted(self._parts))
        parts = [self._parts[rank] for rank in ranks]
        self._parts, self._since_s, self._noticed = {}, None, False
        return self.follow(
            m.Round(
                self.clock,
                ranks,
                tuple(part.weight for part in parts),
                tuple(part.payload for part in parts),
            )
        )

    def awaited(self) -> list[int]:
        """Return the workers that the open round waits for once a quorum is there; each round
        once. Call it after `decide`.
        """
        if self._since_s is None or self._noticed:
            return []
        self._noticed = True
        return [rank for rank in range(self._workers) if rank not in self._parts]

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until the round may end without another part; None: it may not."""
        if len(self._parts) == self._workers:
            return 0.0
        if self._since_s is None or any(part.whole for part in self._parts.values()):
            return None
        return max(0.0, self._since_s + self._grace_s - now_s)

    def follow(self, decided: m.Round) -> m.Round | None:
        """Take the decision on the open round; return it, or None if it has come before.

        Raises:
            RemoteProtocolError: it is of a later round, or of no worker.
        """
        if decided.clock > self.clock or not decided.workers:
            raise RemoteProtocolError(
                f"round {decided.clock} of workers {list(decided.workers)} ends, and round "
                f"{self.clock} is open"
            )
        if decided.clock < self.clock:
            return None
        self.clock += 1
        return decided


class WorkerRounds:
    """The rounds of one worker.

    Args:
        rank: of the worker.
        shards: number of shards.
    """

    def __init__(self, rank: int, shards: int) -> None:
        self._rank = rank
        self._others = range(1, shards)
        self._described: m.Part | None = None
        self._lacking: set[int] = set()  # shards that may lack pushes of the part
        self.ended: m.Round | None = None
        """The last round in which a part of this worker has counted, until `forget`."""
        self._awaited = -1

    def describe(self, part: m.Part) -> None:
        """Set what is sent of the part that ends next."""
        self._described = part

    def end(self) -> list[m.Addressed]:
        """Send that all of this worker's part has been pushed."""
        part = self._described
        if part is None:
            raise LocalProtocolError("a worker's part of a round ends without its weight")
        self._lacking = set(self._others)
        return [m.Addressed(shard, part) for shard in self._others or (0,)]

    def taken(self, shard: int) -> list[m.Addressed]:
        """Note that a shard has all of the part.

        Raises:
            RemoteProtocolError: it has said so before.
        """
        if shard not in self._lacking or self._described is None:
            raise RemoteProtocolError(f"shard {shard} takes a part that was not sent")
        self._lacking.discard(shard)
        return [] if self._lacking else [m.Addressed(0, self._described)]

    def receive(self, decided: m.Round) -> list[m.Addressed]:
        """Take the decision of shard 0, and pass it on."""
        if self._rank in decided.workers:
            self.ended, self._described = decided, None
        return [m.Addressed(shard, decided) for shard in self._others]

    def await_part(self, awaited: m.Awaited) -> None:
        """Note that a round waits for this worker."""
        self._awaited = awaited.clock

    def is_awaited(self, clock: int) -> bool:
        """Return whether the part that follows from the values of a clock is awaited."""
        return self._awaited >= clock


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return the share of each part in the average: equal ones where all weights are 0."""
    total = sum(weights)
    return [weight / total if total else 1 / len(weights) for weight in weights]


def weights_of(decided: m.Round) -> Mapping[int, float]:
    """Return the share of each worker in the average of a round."""
    return dict(zip(decided.workers, shares_of(decided.weights), strict=True))
