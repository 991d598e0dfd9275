"""The stopwatch, on a clock of the test."""

from __future__ import annotations

import pytest

import poseidon.pycaffe as caffe
from poseidon.pycaffe import timer


def test_times_are_from_a_start_to_the_next_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "clock_of", lambda _: iter(range(10)).__next__)
    watch = caffe.Timer()
    assert watch.ms == 0
    watch.start()
    watch.start()
    watch.stop()
    watch.stop()
    assert watch.ms == 1000
    watch.start()
    assert (watch.ms, watch.ms) == (1000, 1000)
