"""The same work for several hosts, all at once: what is in the way of one does not keep the others from being reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from poseidon.errors import JobError

Item = TypeVar("Item")
Result = TypeVar("Result")


def all_at_once(
    work: Callable[[Item], Result], items: Sequence[Item], *, name: str, most: int | None = None
) -> list[Result | JobError]:
    """Do the work for each item on a thread of its own.

    Args:
        work: may raise JobError.
        items: whom it is for.
        name: of the threads.
        most: so many at the same time; None: all.

    Returns:
        In the order of the items what came of each, or the JobError that was in its way.
    """

    def outcome(item: Item) -> Result | JobError:
        try:
            return work(item)
        except JobError as error:
            return error

    threads = len(items) if most is None else min(most, len(items))
    with ThreadPoolExecutor(max(1, threads), name) as pool:
        return list(pool.map(outcome, items))
