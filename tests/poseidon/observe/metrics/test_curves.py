"""Which curves a log has, and that a drawing depends on nothing but the log."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from poseidon.observe.metrics.curves import (
    FORMATS,
    Panel,
    XAxis,
    YScale,
    _extent,
    curves,
    draw,
    moving_average,
    scores,
)
from poseidon.observe.metrics.training_log import LogRow, TrainingLog

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
def test_limits_of_an_axis(
    values: tuple[float, ...], usual: float, expected: tuple[float, float]
) -> None:
    """One value alone is shown from zero on."""
    assert _extent(values, typical_max=usual) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (0, [1, 5, 3, 7, 9]),
        (1, [1, 5, 3, 7, 9]),
        (2, [1, 3, 5, 19 / 3, 9]),
        (3, [1, 3, 5, 19 / 3, 9]),
        (5, [1, 3, 5, 19 / 3, 9]),
    ],
)
def test_a_moving_average_is_around_each_point(window: int, expected: list[float]) -> None:
    assert moving_average([1, 5, 3, 7, 9], window) == pytest.approx(expected)


def test_a_moving_average_leaves_out_what_is_not_finite() -> None:
    found = moving_average([2, math.nan, 4, math.inf, math.nan], 3)
    assert found[:4] == [2, 3, 4, 4]
    assert math.isnan(found[4])
    assert moving_average([], 3) == []


def log_of(losses: Sequence[float]) -> TrainingLog:
    rows = tuple(
        LogRow(iteration=i, seconds=i, rate=0.1, outputs={"loss": loss})
        for i, loss in enumerate(losses)
    )
    return TrainingLog(train=rows, test=(), losses=frozenset({"loss"}))


def svg_of(losses: Sequence[float], **how: Any) -> str:
    return draw([("n", log_of(losses))], [Panel.LOSS], XAxis.ITERATIONS, "svg", **how).decode()


@pytest.mark.parametrize(
    ("losses", "scale", "expected"),
    [
        ([2.3, 1.0, 0.5], YScale.AUTO, False),
        ([2.3, 0.1, 0.001], YScale.AUTO, True),
        ([2.3, 0.1, 0.0], YScale.AUTO, False),
        ([2.3, 0.1, 0.0], YScale.LOG, True),
        ([2.3, 0.1, 0.001], YScale.LINEAR, False),
        ([math.nan, math.inf], YScale.AUTO, False),
        ([math.nan, 0.0], YScale.LOG, False),
    ],
)
def test_the_axis_is_logarithmic_where_it_helps(
    losses: list[float], scale: YScale, expected: bool
) -> None:
    assert ("loss (logarithmic)" in svg_of(losses, scale=scale)) is expected


@pytest.mark.parametrize(
    ("points", "smooth", "window"), [(400, None, 10), (79, None, 0), (79, 5, 5), (400, 1, 0)]
)
def test_long_curves_of_the_train_net_are_smoothed(
    points: int, smooth: int | None, window: int
) -> None:
    text = svg_of([1 + i % 2 for i in range(points)], smooth=smooth)
    assert (f"mean of {window} points" in text) is bool(window)
    assert ("points" in text) is bool(window)


@pytest.mark.parametrize(
    ("kind", "start"),
    [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")],
    ids=FORMATS.keys(),
)
def test_drawings(kind: str, start: bytes) -> None:
    content = draw([("one", LOG), ("two", LOG)], [Panel.LOSS, Panel.ACCURACY], XAxis.SECONDS, kind)
    assert content.startswith(start)
    if kind == "png":
        assert content == draw(
            [("one", LOG), ("two", LOG)], [Panel.LOSS, Panel.ACCURACY], XAxis.SECONDS, kind
        )
    assert "matplotlib.pyplot" not in sys.modules


OF_SCRIPT = TrainingLog(
    train=(
        LogRow(iteration=1, seconds=0, rate=0.1, outputs={"loss": 2, "lr": 0.1, "grad_norm": 5}),
        LogRow(iteration=2, seconds=1, rate=math.nan, outputs={"val/loss": 3, "val/acc": 0.5}),
        LogRow(iteration=3, seconds=2, rate=math.nan, outputs={"loss": 1, "val_grad_norm": 4}),
    ),
    test=(),
    losses=frozenset({"loss", "val/loss"}),
    of_script=True,
)


@pytest.mark.parametrize(
    ("panel", "expected"),
    [
        (Panel.LOSS, {"n: loss": (2, 1), "n: val/loss": (3,)}),
        (Panel.TRAIN_LOSS, {"n: loss": (2, 1), "n: val/loss": (3,)}),
        (Panel.TEST_LOSS, {}),
        (Panel.ACCURACY, {"n: val/acc": (0.5,)}),
        (Panel.RATE, {"n: rate": (0.1,)}),
        ("grad_norm", {"n: grad_norm": (5,), "n: val_grad_norm": (4,)}),
    ],
)
def test_curves_of_a_script(panel: Panel | str, expected: dict[str, tuple[float, ...]]) -> None:
    found = curves("n", OF_SCRIPT, panel, XAxis.ITERATIONS)
    assert {curve.label: curve.y for curve in found} == expected
    assert scores(OF_SCRIPT) == ["grad_norm"]
    assert scores(LOG) == []


def test_many_panels_are_drawn_below_each_other() -> None:
    panels: list[Panel | str] = [Panel.LOSS, Panel.ACCURACY, Panel.RATE, "grad_norm"]
    drawn = draw([("n", OF_SCRIPT)], panels, XAxis.ITERATIONS, "svg").decode()
    assert all(f"{title} over iterations" in drawn for title in ("loss", "grad_norm"))
