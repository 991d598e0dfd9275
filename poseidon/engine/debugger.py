"""`breakpoint()` and pdb in the user's code of a worker.

Law: a debugger reads the launcher's terminal. Only the worker of a job with one worker, on the
launcher's host, may do so; see `launcher_streams`.
"""

from __future__ import annotations

import pdb
import sys
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from poseidon.errors import JobError, UsageError
from poseidon.exchange.watchdog import Watchdog

NO_DEBUGGER = (
    "breakpoint() needs a terminal, which only a job with one worker on the launcher's host has; "
    "use --workers=1 and one client"
)
ENDED = "the job was ended in its debugger, or the debugger's input has ended"


def refuse_breakpoints() -> None:
    """Let `breakpoint()` raise an error: a debugger would have nothing to read."""
    sys.breakpointhook = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UsageError(NO_DEBUGGER)


def ending(error: BaseException, workers: int) -> JobError | None:
    """Return the error of a job that has ended in a debugger; None: it ended otherwise.

    Args:
        error: what has ended the work; pdb's own, or one that follows from it.
        workers: of the job.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BdbQuit):
            own = JobError(NO_DEBUGGER if workers > 1 else ENDED)
            return own.with_traceback(error.__traceback__)
        cause = cause.__cause__
    return None


@contextmanager
def unwatched(watchdog: Watchdog) -> Iterator[None]:
    """Let a person take any time in pdb, or a debugger made of it, inside the block: the loop does
    not hang.
    """
    interact: Any = pdb.Pdb.interaction

    def interaction(*arguments: Any, **named: Any) -> Any:
        with watchdog.paused():
            return interact(*arguments, **named)

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
    try:
        yield
    finally:
        pdb.Pdb.interaction = interact  # type: ignore[method-assign]
