"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm

from poseidon.data.progress import IN_BYTES, Report
from poseidon.metrics.progress import bar_size


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Yield a report that draws on stderr, if that is a terminal; each activity gets a bar of its own."""
    bars: dict[str, tqdm[NoReturn]] = {}

    def report(activity: str, done: int, total: int) -> None:
        if activity not in bars:
            in_bytes = activity in IN_BYTES
            for bar in bars.values():
                bar.close()
            bars[activity] = tqdm(
                desc=activity,
                total=total,
                unit="B" if in_bytes else "record",
                unit_scale=in_bytes,
                unit_divisor=1024 if in_bytes else 1000,
                disable=not sys.stderr.isatty(),
                **bar_size(sys.stderr),
            )
        bar = bars[activity]
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()
