"""What a worker measures of its iterations, and reports."""

from __future__ import annotations

import pytest
import torch

from poseidon.engine.own_time import REPORT_S, OwnTime


class Clocks:
    """The time of day, and the time of all waits, both moved by hand; and what was reported."""

    def __init__(self) -> None:
        self.now_s, self.waited_s = 100.0, 7.0
        self.sent: list[tuple[int, float, float]] = []
        self.own_time = OwnTime(
            self._send, lambda: self.waited_s, torch.device("cpu"), now_s=lambda: self.now_s
        )

    def _send(self, event: str, *, iterations: int, own_s: float, whole_s: float) -> None:
        assert event == "timed"
        self.sent.append((iterations, own_s, whole_s))

    def compute(self, own_s: float, waits_s: float = 0.0) -> None:
        self.now_s += own_s + waits_s
        self.waited_s += waits_s


def test_the_own_time_of_iterations_is_reported_once_another_one_begins() -> None:
    clocks = Clocks()
    own = clocks.own_time
    own.end()  # of no iteration
    for own_s in (1.0, 2.0):
        clocks.compute(50, 60)  # a test or a snapshot
        own.begin()
        clocks.compute(own_s, 3)
        own.end()
    assert clocks.sent == [(1, 1.0, 4.0)]
    own.begin()
    assert clocks.sent == [(1, 1.0, 4.0), (2, 3.0, pytest.approx(9.0))]


def test_of_several_calls_in_a_row_the_last_one_counts() -> None:
    """A loop that evaluates in between, and one of two modules, whose steps end one by one."""
    clocks = Clocks()
    own = clocks.own_time
    own.begin()
    clocks.compute(50)
    own.begin()
    for _ in range(2):
        clocks.compute(1, 2)
        own.end()
    own.begin()
    assert clocks.sent == [(1, 2.0, 6.0)]


def test_fast_iterations_are_reported_a_few_times_a_second() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.own_time.begin()
        clocks.compute(REPORT_S / 10)
        clocks.own_time.end()
    assert 9 <= len(clocks.sent) <= 11
