"""Where in a script an operator was made: shown when it fails."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
DEPTH = 8

Frame = tuple[str, int, str]


def caller_of_operator() -> list[Frame]:
    """Return file, line and function of the calls that made an operator, the nearest outside
    this package first.
    """
    frames: list[Frame] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < DEPTH:
        code = frame.f_code
        if frames or not code.co_filename.startswith(PACKAGE):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frames
