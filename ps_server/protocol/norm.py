"""The norm over all gradients of an iteration, for a limit on it (`clip`), as one worker takes
part in it.

Each shard sends rank 0 the sum of squares of its chunks, and rank 0 has the sum for the gradients
outside the store (`outside_norm`): each as a few numbers whose exact sum it is. Rank 0 rounds their
exact sum once, so the total has the same bits however the tables are cut and dealt. It sends the
total to the shards. Where there are gradients outside, shard 0 passes the total on to the other
workers, which need it, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from ps_server.errors import LocalProtocolError
from ps_server.protocol import messages as m


class WorkerNorm:
    """One worker's part in the norms.

    Args:
        rank: of the worker.
        shards: those that hold chunks whose gradients count.
        outside: whether gradients outside the store count, too.
        clock: the first iteration.
    """

    def __init__(self, rank: int, shards: AbstractSet[int], *, outside: bool, clock: int) -> None:
        self._rank = rank
        self._shards = frozenset(shards)
        self._has_outside = outside
        self._next = clock  # rank 0: the iteration whose norm comes next
        self._partial: dict[int, dict[int, m.PartialNorm]] = {}
        self._outside: dict[int, Sequence[float]] = {}
        self._totals: dict[int, float] = {}

    def expects_partial(self, shard: int, clock: int) -> bool:
        """Return whether this is rank 0, and the shard's part of the next norm has not come."""
        missing = self._shards - self._partial.get(clock, {}).keys()
        return self._rank == 0 and shard in missing and clock == self._next

    def expects_total(self, shard: int, clock: int, *, now: int) -> bool:
        """Return whether shard 0 may pass rank 0's total of an iteration on to this worker,
        whose clock is `now`.
        """
        passes_on = self._has_outside and self._rank != 0 and shard == 0
        return passes_on and now - 1 <= clock <= now and clock not in self._totals

    def add_outside(self, clock: int, squares: Sequence[float]) -> list[tuple[int, m.TotalNorm]]:
        """Add numbers whose sum is the sum of squares of the gradients outside the store.

        Return what to send to which shard.

        Raises:
            LocalProtocolError: this is not rank 0, or the store has no outside norm.
        """
        if self._rank != 0 or not self._has_outside:
            raise LocalProtocolError(
                "only worker 0 of a store with an outside norm adds to the norm"
            )
        self._outside[clock] = squares
        return self._complete(clock)

    def add_partial(self, shard: int, part: m.PartialNorm) -> list[tuple[int, m.TotalNorm]]:
        """Add a shard's part. Return what to send to which shard."""
        self._partial.setdefault(part.clock, {})[shard] = part
        return self._complete(part.clock)

    def put_total(self, norm: m.TotalNorm) -> None:
        """Note a total that shard 0 has passed on."""
        self._totals[norm.clock] = norm.total

    def take_total(self, clock: int) -> float | None:
        """Return the sum of squares over all gradients of an iteration, once; None while it is
        not known.
        """
        return self._totals.pop(clock, None)

    def _complete(self, clock: int) -> list[tuple[int, m.TotalNorm]]:
        parts = self._partial.get(clock, {})
        if parts.keys() != self._shards or (self._has_outside and clock not in self._outside):
            return []
        self._partial.pop(clock, None)
        self._next = clock + 1
        sums = chain(*(part.sums for part in parts.values()), self._outside.pop(clock, ()))
        total = math.fsum(sums)
        receivers = set(self._shards)
        if self._has_outside:
            self._totals[clock] = total
            receivers.add(0)
        return [(shard, m.TotalNorm(clock, total)) for shard in sorted(receivers)]
