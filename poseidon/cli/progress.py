"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm

from poseidon.data.progress import Report


@contextmanager
def progress_bar(unit: str, *, bytes_counted: bool = False) -> Iterator[Report]:
    """A report that draws on stderr when that is a terminal; a new activity gets a new bar.

    Args:
        unit: what is counted, in the singular.
        bytes_counted: count in units of 1024.
    """
    bars: dict[str, tqdm[NoReturn]] = {}

    def report(activity: str, done: int, total: int) -> None:
        if activity not in bars:
            for bar in bars.values():
                bar.close()
            bars[activity] = tqdm(
                desc=activity,
                total=total,
                unit=unit,
                unit_scale=bytes_counted,
                unit_divisor=1024 if bytes_counted else 1000,
                disable=not sys.stderr.isatty(),
                dynamic_ncols=True,
            )
        bar = bars[activity]
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()
