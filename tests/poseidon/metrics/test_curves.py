"""Which curves a log has, and that a drawing depends on nothing but the log."""

from __future__ import annotations

import math
import sys

import pytest

from poseidon.metrics.curves import FORMATS, Panel, XAxis, _extent, curves, draw
from poseidon.metrics.training_log import LogRow, TrainingLog

LOG = TrainingLog(
    train=tuple(
        LogRow(iteration=10 * i, seconds=i / 2, rate=0.1 / (i + 1), outputs={"loss": 1 / (i + 1)})
        for i in range(4)
    ),
    test=(
        LogRow(iteration=0, seconds=0, rate=0.1, outputs={"accuracy": 0.1, "loss": 2}),
        LogRow(iteration=30, seconds=1.5, rate=0.1, outputs={"accuracy": 0.8, "loss": 0.5}),
    ),
    losses=frozenset({"loss"}),
)


@pytest.mark.parametrize(
    ("panel", "expected"),
    [
        (Panel.LOSS, {"n: train loss": (1, 0.5, 1 / 3, 0.25), "n: test loss": (2, 0.5)}),
        (Panel.TRAIN_LOSS, {"n: train loss": (1, 0.5, 1 / 3, 0.25)}),
        (Panel.TEST_LOSS, {"n: test loss": (2, 0.5)}),
        (Panel.ACCURACY, {"n: test accuracy": (0.1, 0.8)}),
        (Panel.RATE, {"n: rate": (0.1, 0.05, 0.1 / 3, 0.025)}),
    ],
)
def test_curves(panel: Panel, expected: dict[str, tuple[float, ...]]) -> None:
    assert {curve.label: curve.y for curve in curves("n", LOG, panel, XAxis.ITERATIONS)} == expected


def test_axes() -> None:
    (curve,) = curves("n", LOG, Panel.ACCURACY, XAxis.ITERATIONS)
    assert curve.x == (0, 30)
    (curve,) = curves("n", LOG, Panel.ACCURACY, XAxis.SECONDS)
    assert curve.x == (0, 1.5)


@pytest.mark.parametrize(
    ("values", "usual", "expected"),
    [
        ((0.1,), 1.0, (-0.04, 1.04)),
        ((0.001, 0.001), 0.0, (-0.00005, 0.0013)),
        ((0,), 0.0, (-0.04, 1.04)),
        ((-2, -2), 0.0, (-2.6, 0.1)),
        ((4000, 5000), 0.0, (3960, 5040)),
        ((1, math.nan, 3, math.inf), 0.0, (0.92, 3.08)),
        ((), 0.0, (-0.04, 1.04)),
    ],
)
def test_limits_of_an_axis(values: tuple[float, ...], usual: float, expected: tuple[float, float]) -> None:
    """One value alone is shown from zero on."""
    assert _extent(values, typical_max=usual) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")], ids=FORMATS.keys()
)
def test_drawings(kind: str, start: bytes) -> None:
    content = draw([("one", LOG), ("two", LOG)], [Panel.LOSS, Panel.ACCURACY], XAxis.SECONDS, kind)
    assert content.startswith(start)
    if kind == "png":
        assert content == draw(
            [("one", LOG), ("two", LOG)], [Panel.LOSS, Panel.ACCURACY], XAxis.SECONDS, kind
        )
    assert "matplotlib.pyplot" not in sys.modules
