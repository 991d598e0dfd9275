"""Errors that were raised in another process, which the user's code has started: a worker of a
DataLoader, of a pool (`multiprocessing`, `concurrent.futures`, joblib), or of
`torch.multiprocessing.spawn`.

They carry the traceback of that process as a text: in their message, or in their cause.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_CAUSES = ("RemoteTraceback", "_RemoteTraceback")
_NOT_OF_USERS = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    str(Path(__file__).parents[1]),
    "<",
)
_LONGEST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedElsewhere:
    """An error of another process.

    Attributes:
        location: the innermost line of the user's code, as `train.py, line 7`; empty: none of its
            frames is the user's.
        problem: the type and the text of the error, on one line.
    """

    location: str
    problem: str


def raised_elsewhere(error: BaseException) -> RaisedElsewhere | None:
    """Return what an error of another process was; None for one of this process."""
    for text in _texts(error):
        _, head, innermost = text.rpartition(_HEAD)
        if head:
            found = _read(innermost)
            if found is not None:
                return found
    return None


def _texts(error: BaseException) -> Iterator[str]:
    yield str(error)
    cause = error.__cause__
    if type(cause).__name__ in _CAUSES:
        yield str(cause)


def _read(traceback: str) -> RaisedElsewhere | None:
    """Read a traceback without its head."""
    location = ""
    lines = traceback.rstrip().removesuffix('"""').strip("\n").splitlines()
    for number, line in enumerate(lines):
        if not line.startswith(" "):
            problem = " ".join(" ".join(lines[number:]).split())
            if len(problem) > _LONGEST:
                problem = f"{problem[:_LONGEST]} ..."
            return RaisedElsewhere(location=location, problem=problem)
        frame = _FRAME.match(line)
        if frame is not None and not frame[1].startswith(_NOT_OF_USERS):
            location = f"{Path(frame[1]).name}, line {frame[2]}"
    return None
