"""Flags that several commands have."""

from __future__ import annotations

from enum import Enum

from poseidon.flags.flag import Flag
from poseidon.flags.values import one_of, parts

BACKENDS = ("leveldb", "lmdb")
"""The kinds of a database."""
IMPORT = Flag(
    name="import",
    text="Python modules that add layers",
    dest="imports",
    metavar="MODULES",
    read=parts,
    default=(),
)
ON_TERMINAL = "on a terminal: auto (log and bar), bar, lines"
"""The help of --progress of a command with a log."""


class ShownProgress(Enum):
    """A value of --progress."""

    AUTO = "auto"
    """On a terminal the bar below the log; in a pipe the log, and lines on the progress of a
    job.
    """
    BAR = "bar"
    """On a terminal the bar alone, with warnings and results; in a pipe as `auto`."""
    LINES = "lines"
    """The log, and lines on the progress, also on a terminal."""


def progress(text: str = "auto (a bar on a terminal), bar, lines (one a minute)") -> Flag:
    """Return the flag --progress of a command that is not a job."""
    words = tuple(shown.value for shown in ShownProgress)
    read, usual = one_of(words), ShownProgress.AUTO.value
    return Flag(name="progress", text=text, read=read, choices=words, default=usual, metavar="HOW")
