"""How long work tells how far it is.

Law: the work decides nothing about screens: it calls a `Report`, and the command line draws the bar.
"""

from __future__ import annotations

from collections.abc import Callable

# Called with what is being done, how much of it is done, and how much there is in all.
Report = Callable[[str, int, int], object]

DOWNLOADING = "downloading"
CHECKING = "reading what is to be copied"
COPYING = "copying"
# The activities that are counted in bytes; all others are counted in records.
IN_BYTES = (DOWNLOADING, CHECKING, COPYING)


def silent(activity: str, done: int, total: int) -> None:
    """A report that nobody reads."""
