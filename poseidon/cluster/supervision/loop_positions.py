"""The positions of a script's workers in their loops, and what is wrong whatever they do next.

Law: pure. A report costs as many comparisons as there are different positions, which are few,
however many the workers are.
"""

from __future__ import annotations

from poseidon.cluster.events import LoopPosition

DISTRIBUTE, STEP, LEAVING = "distribute", "step", "close"
"""Values of `LoopPosition.current`: a worker waits until all have joined; it ends a step; it waits
at the end of its `with` block.
"""


class LoopPositions:
    """The last position that each worker has reported."""

    def __init__(self) -> None:
        self._positions: dict[int, LoopPosition] = {}
        self._ranks: dict[LoopPosition, dict[int, None]] = {}
        self._absent: int | None = None

    def move(self, rank: int, position: LoopPosition) -> str | None:
        """Take a position. Return a sentence about two workers that made different numbers of
        steps before a collection, or as `end_without_joining`; or None.

        A finding is certain, whenever the positions were reported: a worker that waits in a
        collection makes no step before all have begun it. So another that has not begun it, yet has
        made or ends more steps, waits for this one in an earlier collection, or will be too late.
        """
        before = self._positions.get(rank)
        self._positions[rank] = position
        if before is not None:
            del self._ranks[before][rank]
            if not self._ranks[before]:
                del self._ranks[before]
        self._ranks.setdefault(position, {})[rank] = None
        for other, ranks in self._ranks.items():
            first = next(iter(ranks))
            if _passed_by(position, other):
                return _mismatch(rank, position, first, other)
            if _passed_by(other, position):
                return _mismatch(first, other, rank, position)
        return self._unjoined()

    def end_without_joining(self, rank: int) -> str | None:
        """Note that a worker has ended without `distribute`. Return a sentence about one that waits
        there for it; or None.
        """
        self._absent = rank if self._absent is None else self._absent
        return self._unjoined()

    def _unjoined(self) -> str | None:
        if self._absent is None:
            return None
        for position, ranks in self._ranks.items():
            if position.current == DISTRIBUTE:
                return (
                    f"worker {next(iter(ranks))} waits in distribute(), and worker {self._absent} "
                    "has ended without it: every worker must call poseidon.distribute()"
                )
        return None


def _reached(position: LoopPosition) -> int:
    return position.steps + (position.current == STEP)


def _passed_by(position: LoopPosition, other: LoopPosition) -> bool:
    """Return whether a worker waits for another one that has gone on without it."""
    return (
        position.current not in ("", STEP)
        and other.collections < position.collections
        and _reached(other) > position.steps
    )


def _mismatch(rank: int, position: LoopPosition, other: int, ahead: LoopPosition) -> str:
    waits, must = f"in {position.current}()", f"call {position.current}()"
    if position.current == LEAVING:
        waits, must = "at the end of its `with` block", "end it"
    return (
        f"worker {rank} waits {waits} after step {position.steps}, and worker {other} has gone on "
        f"to step {_reached(ahead)} without it: all workers must {must}, after equally many steps"
    )
