"""A function on a thread for each rank: workers that stand for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def on_threads(ranks: int, work: Callable[[int], T]) -> list[T]:
    """Return `work(rank)` of each rank, all at the same time.

    Raises:
        BaseException: what was raised first; all threads have ended.
    """
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        results[rank] = work(rank)

    failures = failures_on_threads(ranks, run)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(ranks)]


def failures_on_threads(ranks: int, work: Callable[[int], object]) -> list[BaseException]:
    """Return what `work(rank)` of all ranks has raised, in this order."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
