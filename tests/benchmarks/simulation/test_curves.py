"""What the curves say of themselves: facts of the nets, ranges of hosts, tables, the picture."""

from __future__ import annotations

import pytest

from benchmarks.simulation.curves import GBIT_PER_S, LINES, Point, facts, in_ranges, points, winners


def test_factors_pay_up_to_poseidons_break_even() -> None:
    """K P up to 7043 and 4096 for VGG's fc6 and fc7 (reference tables of the ATC 2017 rule)."""
    assert dict(facts("VGG-19").factors_up_to)["fc6"] == 7043 // 32
    assert dict(facts("VGG-19").factors_up_to)["fc7"] == 4096 // 32


def test_points_of_a_net() -> None:
    found = list(points(["AlexNet"], (8, 64, 1024)))
    assert len(found) == len(GBIT_PER_S) * len(LINES) * 3
    assert all(0 < point.efficiency <= 1 + 1e-9 for point in found)

    def seconds(label: str, rate: int, hosts: int) -> float:
        return next(
            p.iteration_s for p in found if (p.label, p.gbit_per_s, p.hosts) == (label, rate, hosts)
        )

    assert seconds("hybrid", 10, 8) < seconds("ps", 10, 8) / 5
    assert seconds("hybrid", 10, 1024) == seconds("ps", 10, 1024) < seconds("svb", 10, 1024) / 4
    # M in place of 2 M (P - 1) / P.
    assert seconds("ps", 1, 8) / seconds("ps + servers", 1, 8) == pytest.approx(2 * 7 / 8, rel=0.05)


def point(label: str, hosts: int, seconds: float, net: str = "AlexNet", rate: int = 1) -> Point:
    return Point(net, rate, label, hosts, seconds, 1 / seconds)


def test_who_wins() -> None:
    times = {
        "ps": (1.0, 1.0, 1.0),
        "svb": (0.99, 2.0, 2.0),
        "hybrid": (0.99, 0.5, 0.5),
        "ring": (1.0, 0.5, 0.6),
    }
    found = [
        point(label, hosts, seconds)
        for label, row in times.items()
        for hosts, seconds in zip((8, 16, 32), row, strict=True)
    ]
    found += [point("ps + servers", hosts, 0.1) for hosts in (8, 16, 32)]
    rows = winners(found)
    assert rows == [
        (8, ("ps", "svb", "hybrid", "ring")),
        (16, ("hybrid", "ring")),
        (32, ("hybrid",)),
    ]
    assert in_ranges(rows) == "8: all; 16: hybrid, ring; 32: hybrid"
    assert in_ranges([(8, ("ps",)), (16, ("ps",)), (32, ("svb",))]) == "8-16: ps; 32: svb"
