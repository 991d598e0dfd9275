"""The positions of a script's workers in their loops, and what is wrong whatever they do next.

Law: pure. A report costs as many comparisons as there are different positions, which are few,
however many the workers are.
"""

from __future__ import annotations

from collections.abc import Mapping

from poseidon.base.call_names import (
    DISTRIBUTE,
    LEAVING,
    MEANS,
    OF_TORCH,
    STEP,
    VALUES,
    LoopPosition,
)

ENDING = (STEP, MEANS)
OF_STEPS = ("", VALUES, *ENDING)
"""Those in which no collection is begun."""


class LoopPositions:
    """The last position that each worker has reported."""

    def __init__(self) -> None:
        self._positions: dict[int, LoopPosition] = {}
        self._ranks: dict[LoopPosition, dict[int, None]] = {}
        self._absent: int | None = None

    def move(self, rank: int, position: LoopPosition) -> str | None:
        """Take a position. Return a sentence about two workers that made different numbers of
        steps before a collection, or make the same call of different loops, or of which one has
        left with an exception, or as `end_without_joining`; or None.

        A finding is certain, whenever the positions were reported: a worker that waits in a
        collection makes no step before all have begun it. So another that has not begun it, yet has
        made or ends more steps, waits for this one in an earlier collection, or will be too late.
        One that an exception takes out of its `with` block counts that as a collection: if it waits
        there for the others, it begins no other one that they may wait in.
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
            if _waits_for_raised(position, other):
                return _left(rank, position, first, other)
            if _waits_for_raised(other, position):
                return _left(first, other, rank, position)
            if _are_apart(position, other):
                return _apart({rank: position, first: other})
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
            if position.collection == DISTRIBUTE:
                return (
                    f"worker {next(iter(ranks))} waits in distribute(), but worker {self._absent} "
                    "has ended without calling it: every worker must call poseidon.distribute()"
                )
        return None


def _reached(position: LoopPosition) -> int:
    return position.iterations + (position.collection == STEP)


def _passed_by(position: LoopPosition, other: LoopPosition) -> bool:
    """Return whether a worker waits for a worker that has continued without it."""
    return (
        position.collection not in OF_STEPS
        and not position.raised  # others may raise it after a later step
        and other.collections < position.collections
        and _reached(other) > position.iterations
    )


def _waits_for_raised(position: LoopPosition, other: LoopPosition) -> bool:
    """Return whether a worker waits in a call of torch.distributed that another worker does not
    make, because an exception has ended its `with` block. The exchange finds this for other calls.
    """
    return (
        position.collection.startswith(OF_TORCH)
        and bool(other.raised and other.collection)
        and position.collections == other.collections
    )


def _awaits(position: LoopPosition, other: LoopPosition) -> bool:
    """Return whether a worker waits for a call that a different worker has not begun."""
    loop, call = position.loop, position.collection
    if loop is None or position.raised or call in ("", STEP):
        return False
    if call == DISTRIBUTE:
        return len(other.loops) < len(position.loops)
    if call in OF_STEPS:
        return _ended(other, loop) < _ended(position, loop)
    return other.collections < position.collections


def _ended(position: LoopPosition, loop: int) -> int:
    return position.loops[loop] if loop < len(position.loops) else 0


def _are_apart(position: LoopPosition, other: LoopPosition) -> bool:
    """Return whether two workers wait for each other; or, after equally many steps and collections,
    end a step of different loops, or wait in collections of different loops.
    """
    if _awaits(position, other) and _awaits(other, position):
        return True
    loops = position.loop, other.loop
    return (
        None not in loops
        and loops[0] != loops[1]
        and not {position.collection, other.collection} & {"", DISTRIBUTE, VALUES}
        and (position.collection in ENDING) == (other.collection in ENDING)
        and not (position.raised or other.raised)
        and _reached(position) == _reached(other)
        and position.collections == other.collections
    )


def _apart(positions: Mapping[int, LoopPosition]) -> str:
    calls = [f"worker {rank} {_does(position)}" for rank, position in sorted(positions.items())]
    return f"{', and '.join(calls)}: all workers must make the same calls in the same order"


def _does(position: LoopPosition) -> str:
    loop, call = position.loop or 0, position.collection
    if loop < 0 or call == DISTRIBUTE:
        return f"waits in {call}()"
    if call == LEAVING:
        return f"waits at the end of the `with` block of module {loop + 1}"
    if call == VALUES:
        return f"waits for the values of module {loop + 1} after its step {_ended(position, loop)}"
    does = "ends a step" if call in ENDING else f"waits in {call}()"
    return f"{does} of module {loop + 1}"


def _left(rank: int, position: LoopPosition, other: int, leaver: LoopPosition) -> str:
    return (
        f"worker {other}: {leaver.raised}; so it has left its `with` block, and worker {rank} waits "
        f"for it in {position.collection}() after step {position.iterations}"
    )


def _mismatch(rank: int, position: LoopPosition, other: int, ahead: LoopPosition) -> str:
    waits, must = f"in {position.collection}()", f"call {position.collection}()"
    if position.collection == LEAVING:
        waits, must = "at the end of its `with` block", "end it"
    return (
        f"worker {rank} waits {waits} after step {position.iterations}, but worker {other} has "
        f"continued to step {_reached(ahead)}: all workers must {must} after the same number of "
        "steps"
    )
