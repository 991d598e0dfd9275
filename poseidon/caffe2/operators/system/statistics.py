"""Statistics of a job: named sums and counts in registries, timers, names and extremes of blobs."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.runtime.values import strings_of


class Registry:
    """Named integers, each with the time of its last change in nanoseconds."""

    def __init__(self) -> None:
        self.values: dict[bytes, int] = {}
        self._times: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def add(self, name: bytes, amount: int) -> None:
        """Add an amount to a value; one that is not there is 0."""
        with self._lock:
            self.values[name] = self.values.get(name, 0) + amount
            self._times[name] = time.time_ns()

    def export(self, reset: bool) -> tuple[list[bytes], list[int], list[int]]:
        """Return names, values and times; with `reset` all values become 0."""
        with self._lock:
            found = list(self.values), list(self.values.values()), list(self._times.values())
            if reset:
                self.values = dict.fromkeys(self.values, 0)
            return found


COMMON = Registry()
"""The registry of operators that name none."""


@operator("StatRegistryCreate")
def stat_registry_create() -> Registry:
    return Registry()


@operator("StatRegistryUpdate", inputs=(2, 3))
def stat_registry_update(keys: Any, values: Tensor, registry: Registry | None = None) -> None:
    """Add values to the statistics with their names."""
    into = COMMON if registry is None else registry
    for name, amount in zip(keys.reshape(-1).tolist(), values.reshape(-1).tolist(), strict=True):
        into.add(name, amount)


@operator("StatRegistryExport", inputs=(0, 1))
def stat_registry_export(
    registry: Registry | None = None, *, reset: bool = True
) -> tuple[Any, Tensor, Tensor]:
    """Return names, values (int64) and the times of their last change (int64, nanoseconds)."""
    names, values, times = (COMMON if registry is None else registry).export(reset)
    keys = strings_of(names)
    return keys, torch.tensor(values, dtype=torch.int64), torch.tensor(times, dtype=torch.int64)


class _Put:
    """An operator that adds a number to statistics of the common registry.

    Args:
        context: the operator.
        stat_name: the name of the statistics; by default the input's.
        magnitude_expand: what the number is multiplied by before it is cut to an integer.
        bound: cut numbers that would be too large for 64 bits.
        default_value: the number of an empty input.
    """

    def __init__(
        self,
        *,
        context: Context,
        stat_name: str = "",
        magnitude_expand: int = 1,
        bound: bool = False,
        default_value: float | None = None,
    ) -> None:
        self.name = f"{stat_name or context.definition.input[0]}/stat_value"
        self.scale = magnitude_expand
        self.bound = bound
        self.default = default_value

    def number(self, x: Tensor) -> int:
        """Return the number that an input gives."""
        if not x.numel():
            if self.default is None:
                raise ValueError("the input is empty and there is no default_value")
            return int(self.default * self.scale)
        value = int(x.reshape(-1)[0].item() * self.scale)
        most = 2**63 - 1
        if not -most <= value <= most and not self.bound:
            raise ValueError(f"{value} is too large for 64 bits; bound=1 cuts it")
        return max(min(value, most), -most)

    def add(self, suffix: str, amount: int) -> None:
        COMMON.add(f"{self.name}{suffix}".encode(), amount)


@operator("IncrementPut")
class IncrementPut(_Put):
    """Adds its input to a sum."""

    def __call__(self, x: Tensor) -> None:
        self.add("", self.number(x))


@operator("AveragePut")
class AveragePut(_Put):
    """Adds its input to a sum, and 1 to a count."""

    def __call__(self, x: Tensor) -> None:
        self.add("/sum", self.number(x))
        self.add("/count", 1)


@operator("StdDevPut")
class StdDevPut(_Put):
    """Adds input, 1, the difference from the first input and its square to its sums."""

    def __call__(self, x: Tensor) -> None:
        value = self.number(x)
        if f"{self.name}/count".encode() not in COMMON.values:
            self.add("/offset", value)
        moved = value - COMMON.values.get(f"{self.name}/offset".encode(), 0)
        self.add("/sum", value)
        self.add("/count", 1)
        self.add("/sumoffset", moved)
        self.add("/sumsqoffset", moved * moved)


class Timer:
    """A time that began, and the name of its statistic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin = time.perf_counter_ns()

    def passed(self) -> int:
        """Return the nanoseconds since it began."""
        return time.perf_counter_ns() - self._begin

    def publish(self) -> int:
        """Add the nanoseconds to the common registry, and return them."""
        passed = self.passed()
        COMMON.add(f"{self.name}/time_ns/sum".encode(), passed)
        COMMON.add(f"{self.name}/time_ns/count".encode(), 1)
        return passed


@operator("TimerBegin")
def timer_begin(*, context: Context, counter_name: str = "") -> Timer:
    """Return a timer that begins now; it has the name of the output by default."""
    return Timer(counter_name or context.definition.output[0])


@operator("TimerEnd")
def timer_end(timer: Timer) -> None:
    """Add the nanoseconds of a timer to the common registry."""
    timer.publish()


@operator("TimerGet")
def timer_get(timer: Timer) -> Tensor:
    """Return the nanoseconds since a timer began, an int64 scalar."""
    return torch.tensor(timer.passed(), dtype=torch.int64)


@operator("TimerGetAndEnd")
def timer_get_and_end(timer: Timer) -> Tensor:
    """Return the nanoseconds of a timer, an int64 scalar, and add them to the common registry."""
    return torch.tensor(timer.publish(), dtype=torch.int64)


@operator("Summarize", outputs=(0, 1))
def summarize(x: Tensor, *, to_file: bool = False) -> tuple[Tensor, ...]:
    """Return least, largest, mean and standard deviation, which divides by the number - 1."""
    flat = x.reshape(-1).float()
    if not flat.numel():
        raise ValueError("an empty tensor has no statistics")
    spread = flat.std() if flat.numel() > 1 else flat.new_zeros(())
    return (torch.stack((flat.min(), flat.max(), flat.mean(), spread)),)
