"""How a job keeps its snapshots, and what it tells of one that is whole.

Law: values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A snapshot that is whole on disk.

    Attributes:
        state: the `.solverstate`.
        iteration: iterations finished.
        seconds: that serializing and writing took.
    """

    state: Path
    iteration: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How snapshots are kept.

    Attributes:
        keep: how many of this run stay on disk, the newest; 0: all.
        on_written: told of each once it is whole, from the thread that wrote it.
        on_wait: told every second while the loop waits for the disk.
        stop_at_nan: weights that are not finite are an error; else a warning. They are never written.
    """

    keep: int = 0
    on_written: Callable[[Written], None] = lambda written: None
    on_wait: Callable[[], None] = lambda: None
    stop_at_nan: bool = True
