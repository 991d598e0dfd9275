"""A call in a process of its own, so that its memory is freed and its time is limited."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")


def in_own_process(
    work: Callable[[A], T],
    argument: A,
    *,
    seconds: float,
    otherwise: Callable[[str], T],
    method: str,
) -> T:
    """Return the result of a call, or what `otherwise` makes of the reason that there is none.

    Args:
        work: a function of a module, if the method is spawn.
        argument: of the call.
        seconds: the longest time.
        otherwise: called with `stopped after 120 s`, or that the process ended without a word.
        method: fork or spawn.
    """
    inbox, outbox = mp.get_context(method).Pipe(duplex=False)
    child = mp.get_context(method).Process(target=_send, args=(work, argument, outbox))  # type: ignore[attr-defined]
    child.start()
    outbox.close()
    try:
        result: T = (
            inbox.recv() if inbox.poll(seconds) else otherwise(f"stopped after {seconds:.0f} s")
        )
    except EOFError:
        result = otherwise("its process ended without a word")
    child.kill()
    child.join()
    return result


def _send(work: Callable[[A], T], argument: A, outbox: Connection) -> None:
    outbox.send(work(argument))
