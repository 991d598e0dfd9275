"""The means over workers of what a script logs (`poseidon.log`), as `train` records.

Law: pure. A mean has all values that workers have sent for an iteration until it is recorded, each
with the same weight, and does not depend on the order in which they came. It is recorded once every
worker has sent a later iteration of that name, or `WAIT_S` after its last value: some workers may
log nothing under that name. What comes later is left out. Where a worker goes back to an earlier
iteration, the script trains once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from poseidon.observe.metrics.job_records import Record, finite
from poseidon.observe.metrics.record import RATES

WAIT_S = 10.0
"""A worker that is late by more has its part in no mean; a value that one worker logs is shown so
much later."""


_Place = tuple[int, int]
"""How often a worker has gone back, and an iteration."""


@dataclass(slots=True)
class _Values:
    """What was sent under one name for one iteration."""

    last_s: float = 0.0
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Name:
    """What was sent under one name.

    Attributes:
        waiting: what is not recorded, in any order.
        latest: where each worker is.
        recorded: what was recorded last.
    """

    waiting: dict[_Place, _Values] = field(default_factory=dict)
    latest: dict[int, _Place] = field(default_factory=dict)
    recorded: _Place = (0, -1)


class LoggedMeans:
    """The values of one start of a job that wait for others.

    Args:
        workers: of the job.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._names: dict[str, _Name] = {}

    def add(self, worker: int, event: Mapping[str, object], now: float) -> None:
        """Add a `logged` event of a worker; one that is not valid adds nothing."""
        iteration, values = event.get("iteration"), event.get("values")
        if not isinstance(iteration, int) or iteration < 0 or not isinstance(values, dict):
            return
        for key, value in values.items():
            name = self._names.setdefault(str(key), _Name())
            back, last = name.latest.get(worker, (0, -1))
            place = name.latest[worker] = back + (iteration < last), iteration
            if place > name.recorded:
                found = name.waiting.setdefault(place, _Values())
                found.last_s = now
                number = finite(value)
                found.values.append(math.nan if number is None else number)

    def due(self, now: float, *, everything: bool = False) -> Iterator[Record]:
        """Yield the records whose time has come, in the order of their iterations.

        Args:
            everything: also those that wait.
        """
        means: dict[_Place, dict[str, float | None]] = {}
        for key, name in self._names.items():
            passed = min(name.latest.values()) if len(name.latest) >= self._workers else (0, -1)
            for place in sorted(name.waiting):
                found = name.waiting[place]
                if everything or place < passed or now >= found.last_s + WAIT_S:
                    del name.waiting[place]
                    name.recorded = max(name.recorded, place)
                    means.setdefault(place, {})[key] = _mean(found.values)
        for place in sorted(means):
            yield _record(place[1], means[place])


def _record(iteration: int, means: Mapping[str, float | None]) -> Record:
    rates = [name for name in RATES if name in means]
    return {
        "kind": "train",
        "iteration": iteration,
        **({"loss": means["loss"]} if "loss" in means else {}),
        **({"rate": means[rates[0]]} if rates else {}),
        "outputs": dict(means),
    }


def _mean(values: list[float]) -> float | None:
    """Return the mean of finite values; None if one is not."""
    if not all(map(math.isfinite, values)):
        return None
    return finite(math.fsum(values) / len(values))
