"""The norm over all gradients of an iteration, for a limit on it (`clip`): a worker's part, and what
shard 0 passes on.

Each shard sends rank 0 the sum of squares of its chunks, of all planes. The sums for the gradients
outside the store (`outside_norm`) come from the workers of host 0, for each plane that applies some:
rank 0 has its own, and shard 0 passes on to it those of the others. Each sum is a few numbers whose
exact sum it is. Rank 0 rounds the exact sum of all once, so the total has the same bits however the
tables are cut and dealt. It sends the total to the shards. Where there are gradients outside, shard
0 passes the total on to the other workers of their planes, which need it, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.seats import Seat


class WorkerNorm:
    """One worker's part in the norms.

    Args:
        seat: of the worker.
        shards: those that hold chunks whose gradients count.
        outside: planes whose gradients outside the store count, too.
        clock: the first iteration.
    """

    def __init__(
        self,
        seat: Seat,
        shards: AbstractSet[int],
        *,
        outside: Collection[int],
        clock: int,
    ) -> None:
        self._seat = seat
        self._shards = frozenset(shards)
        self._planes = frozenset(outside)
        self._next = clock  # rank 0: the iteration whose norm comes next
        self._partial: dict[int, dict[int, Sequence[float]]] = {}
        self._outside: dict[int, dict[int, Sequence[float]]] = {}
        self._totals: dict[int, float] = {}

    def expects_partial(self, shard: int, clock: int) -> bool:
        """Return whether this is rank 0, and the shard's part of the next norm has not come."""
        missing = self._shards - self._partial.get(clock, {}).keys()
        return self._seat.rank == 0 and shard in missing and clock == self._next

    def expects_outside(self, shard: int, norm: m.OutsideNorm) -> bool:
        """Return whether this is rank 0, and shard 0 may pass on a plane's part of the next norm:
        it is another plane's, and has not come.
        """
        missing = self._planes - {0} - self._outside.get(norm.clock, {}).keys()
        is_next = shard == 0 and norm.clock == self._next
        return self._seat.rank == 0 and is_next and norm.plane in missing

    def expects_total(self, shard: int, clock: int, *, now: int) -> bool:
        """Return whether shard 0 may pass rank 0's total of an iteration on to this worker,
        whose clock is `now`.
        """
        passes_on = self._seat.local_rank in self._planes and self._seat.rank != 0 and shard == 0
        return passes_on and now - 1 <= clock <= now and clock not in self._totals

    def add_outside(self, clock: int, squares: Sequence[float]) -> list[m.Addressed]:
        """Add numbers whose sum is the sum of squares of the gradients outside the store that this
        worker's plane applies.

        Return what to send to which shard.

        Raises:
            LocalProtocolError: this worker is not on host 0, or its plane applies none.
        """
        if self._seat.host != 0 or self._seat.local_rank not in self._planes:
            raise LocalProtocolError(
                f"worker {self._seat.rank} adds to the norm; only workers of host 0 may, in the planes "
                f"{sorted(self._planes)} (outside_norm)"
            )
        norm = m.OutsideNorm(self._seat.local_rank, clock, tuple(squares))
        return self.put_outside(norm) if self._seat.rank == 0 else [m.Addressed(0, norm)]

    def put_outside(self, norm: m.OutsideNorm) -> list[m.Addressed]:
        """Take a plane's part on rank 0. Return what to send to which shard."""
        self._outside.setdefault(norm.clock, {})[norm.plane] = norm.sums
        return self._complete(norm.clock)

    def add_partial(self, shard: int, part: m.PartialNorm) -> list[m.Addressed]:
        """Take a shard's part. Return what to send to which shard."""
        self._partial.setdefault(part.clock, {})[shard] = part.sums
        return self._complete(part.clock)

    def put_total(self, norm: m.TotalNorm) -> None:
        """Note a total that shard 0 has passed on."""
        self._totals[norm.clock] = norm.total
        # whoever asks for a total has had the one before
        self._totals.pop(norm.clock - 2, None)

    def total(self, clock: int) -> float | None:
        """Return the sum of squares over all gradients of one of the last two iterations with a
        total; None while it is not known.
        """
        return self._totals.get(clock)

    def _complete(self, clock: int) -> list[m.Addressed]:
        parts, outside = self._partial.get(clock, {}), self._outside.get(clock, {})
        if parts.keys() != self._shards or outside.keys() != self._planes:
            return []
        self._partial.pop(clock, None)
        self._outside.pop(clock, None)
        self._next = clock + 1
        total = math.fsum(chain(*parts.values(), *outside.values()))
        receivers = set(self._shards)
        norm = m.TotalNorm(clock, total)
        if self._planes:
            self.put_total(norm)
            receivers.add(0)
        return [m.Addressed(shard, norm) for shard in sorted(receivers)]


class OutsideNorms:
    """The parts of planes that shard 0 passes on: each plane's once for each iteration.

    Args:
        planes: that have one; that of plane 0 needs no passing on.
        clock: the first iteration.
    """

    def __init__(self, planes: Collection[int], clock: int) -> None:
        self._planes = planes
        self._clock = clock  # the iteration whose total has not come
        self._came: set[int] = set()

    def add(self, norm: m.OutsideNorm) -> None:
        """Note a plane's part.

        Raises:
            RemoteProtocolError: the plane has none, it has come, or it is of a different iteration.
        """
        if norm.plane not in self._planes or norm.plane in self._came or norm.clock != self._clock:
            raise RemoteProtocolError(
                f"plane {norm.plane} adds to the norm of iteration {norm.clock}; expected one of "
                f"the planes {sorted(self._planes)}, once in iteration {self._clock}"
            )
        self._came.add(norm.plane)

    def end(self, clock: int) -> None:
        """Note that the total of an iteration has come.

        Raises:
            RemoteProtocolError: it is of a different iteration.
        """
        if clock != self._clock:
            raise RemoteProtocolError(
                f"a norm of iteration {clock} came; expected iteration {self._clock}"
            )
        self._clock += 1
        self._came.clear()
