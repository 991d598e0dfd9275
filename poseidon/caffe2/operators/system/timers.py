"""Timers: nanoseconds since a moment."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator


class Timer:
    """A moment, under a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = time.monotonic_ns()

    def nanoseconds(self) -> Tensor:
        """Return the time since the moment, as a scalar."""
        return torch.tensor(time.monotonic_ns() - self.start)


@operator("TimerBegin")
def timer_begin(*, counter_name: str = "") -> Any:
    """Return a timer that begins now."""
    return Timer(counter_name)


@operator("TimerGet")
def timer_get(timer: Any) -> Tensor:
    """Return the nanoseconds since a timer began."""
    return timer.nanoseconds()  # type: ignore[no-any-return]


@operator("TimerGetAndEnd")
def timer_get_and_end(timer: Any) -> Tensor:
    """Return the nanoseconds since a timer began, a tensor of one value; nothing reads the timer any more."""
    return timer.nanoseconds().reshape(1)  # type: ignore[no-any-return]


@operator("TimerEnd")
def timer_end(timer: Any) -> None:
    """Do nothing: nothing reads the timer any more."""
