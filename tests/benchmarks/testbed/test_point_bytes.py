"""How far counts are from a formula, and how even shards are."""

from __future__ import annotations

from benchmarks.testbed.measurement import Measured
from benchmarks.testbed.point_bytes import evenness, furthest


def test_the_furthest_count_is_told_with_its_sign() -> None:
    measured = Measured(name="ps", sent_bytes=[101.0, 100.0], received_bytes=[98.0, 100.0])
    assert round(furthest(measured, 100.0), 9) == -0.02
    assert furthest(measured, 0.0) == 0.0


def test_evenness_is_the_busiest_over_the_mean() -> None:
    assert evenness([10, 10, 10]) == 1.0
    assert evenness([10, 20]) == 20 / 15
