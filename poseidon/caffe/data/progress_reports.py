"""Progress reports of long operations.

Law: an operation calls a `Report`; only the command line draws a progress bar.
"""

from __future__ import annotations

from collections.abc import Callable

# Called with the activity, the amount done, and the total.
Report = Callable[[str, int, int], object]

DOWNLOADING = "downloading"
CHECKING = "reading what is to be copied"
COPYING = "copying"
TESTING = "testing"
TIMING = "timing"
EXTRACTING = "extracting"
UNITS = {
    DOWNLOADING: "B",
    CHECKING: "B",
    COPYING: "B",
    TESTING: "batch",
    TIMING: "it",
    EXTRACTING: "batch",
}
"""The unit of each activity that does not count records; B: bytes."""


def silent(activity: str, done: int, total: int) -> None:
    """Ignore a progress report."""
