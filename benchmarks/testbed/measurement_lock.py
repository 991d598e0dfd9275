"""One measurement at a time on a machine: two at once would measure each other."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / "poseidon-measurement.lock"


@contextlib.contextmanager
def alone(report: Callable[[str], None], lock: Path = LOCK) -> Iterator[None]:
    """Wait until no other measurement runs, and keep others waiting until the end.

    Args:
        report: receives a line while another measurement runs.
        lock: the file that measurements hold; it stays, and a killed measurement leaves it free.
    """
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another measurement holds {lock}; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
