"""Merging of the logs of a job's processes by time.

Law: no I/O. A line without a time (a traceback) stays after the line before it. The lines of a
process keep their order, even if its clock is set back.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping

# Severity, month and day, time: `I1126 20:40:16.731869 `. The year is missing.
_HEAD = re.compile(r"[IWEF](\d{4} \d\d:\d\d:\d\d\.\d{6}) ", re.ASCII)


def merge_logs(logs: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Yield the lines of all logs by time.

    Args:
        logs: the lines of each process, by its name.

    Yields:
        the name of the process and the line.
    """
    streams = [_timed(number, name, lines) for number, (name, lines) in enumerate(logs.items())]
    for _, _, name, line in heapq.merge(*streams, key=lambda entry: entry[:2]):
        yield name, line


def _timed(number: int, name: str, lines: Iterable[str]) -> Iterator[tuple[str, int, str, str]]:
    latest = ""
    for line in lines:
        match = _HEAD.match(line)
        if match is not None:
            latest = max(latest, match[1])
        yield latest, number, name, line
