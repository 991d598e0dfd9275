"""Plots of training logs as image files.

Law: each plot has its own `Figure`; pyplot's global state is not used. The chart types are those of Caffe's
tools/extra/plot_training_log.py.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from poseidon.metrics.training_log import LogRow, TrainingLog


class XAxis(Enum):
    """The quantity on the horizontal axis."""

    ITERATIONS = "iterations"
    """Finished iterations."""
    SECONDS = "seconds"
    """Seconds since the start."""


class Panel(Enum):
    """The quantity in a panel, named as in Caffe's chart types."""

    ACCURACY = "accuracy"
    """Outputs of the test nets without a loss weight."""
    LOSS = "loss"
    """Losses of train and test nets."""
    TEST_LOSS = "test loss"
    """Losses of the test nets."""
    TRAIN_LOSS = "train loss"
    """Losses of the train net."""
    RATE = "learning rate"
    """The learning rate."""


CHARTS = {
    0: (Panel.ACCURACY, XAxis.ITERATIONS),
    1: (Panel.ACCURACY, XAxis.SECONDS),
    2: (Panel.TEST_LOSS, XAxis.ITERATIONS),
    3: (Panel.TEST_LOSS, XAxis.SECONDS),
    4: (Panel.RATE, XAxis.ITERATIONS),
    5: (Panel.RATE, XAxis.SECONDS),
    6: (Panel.TRAIN_LOSS, XAxis.ITERATIONS),
    7: (Panel.TRAIN_LOSS, XAxis.SECONDS),
}
"""Caffe's chart types."""

INCHES = (9.0, 5.0)
TYPICAL_MAX = {Panel.ACCURACY: 1.0}
"""The upper end of a panel's axis if it has a single value."""
MARGIN = 0.04
"""The margin on both sides of an axis, as a fraction of its length."""
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
"""The file formats with their metadata. Without dates, so that the same log gives the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a panel; `faint` for the many noisy points of a train net."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    faint: bool


def curves(name: str, log: TrainingLog, panel: Panel, x_axis: XAxis) -> list[Curve]:
    """Return the curves of a log for a panel.

    Args:
        name: the name of the log, for the legend.
        log: the tables of the log.
        panel: the quantity.
        x_axis: the horizontal axis.
    """
    if panel is Panel.RATE:
        rows = log.train or log.test
        return (
            [_curve(f"{name}: rate", rows, [row.rate for row in rows], x_axis, faint=False)] if rows else []
        )
    wanted_losses = panel is not Panel.ACCURACY
    found = []
    for net, rows, panels in (
        ("train", log.train, (Panel.LOSS, Panel.TRAIN_LOSS)),
        ("test", log.test, (Panel.LOSS, Panel.TEST_LOSS, Panel.ACCURACY)),
    ):
        outputs = dict.fromkeys(output for row in rows for output in row.outputs)
        for output in outputs if panel in panels else ():
            if (output in log.losses) is wanted_losses:
                having = [row for row in rows if output in row.outputs]
                values = [row.outputs[output] for row in having]
                label = f"{name}: {net} {output}"
                found.append(_curve(label, having, values, x_axis, faint=net == "train"))
    return found


def draw(logs: Sequence[tuple[str, TrainingLog]], panels: Sequence[Panel], x_axis: XAxis, kind: str) -> bytes:
    """Draw panels side by side.

    Args:
        logs: the names and tables of the logs.
        panels: the panels from left to right.
        x_axis: the horizontal axis of all panels.
        kind: one of `FORMATS`.

    Returns:
        the content of a file of that format.
    """
    figure = Figure(figsize=(INCHES[0] * len(panels), INCHES[1]), layout="constrained")
    shown = [[curve for name, log in logs for curve in curves(name, log, panel, x_axis)] for panel in panels]
    width = _extent([x for drawn in shown for curve in drawn for x in curve.x])
    for index, (panel, drawn) in enumerate(zip(panels, shown, strict=True)):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for curve in drawn:
            style: dict[str, Any] = {"alpha": 0.6} if curve.faint else {}
            if not curve.faint or len(curve.x) == 1:  # a line through one point is invisible
                style["marker"] = "."
            axes.plot(curve.x, curve.y, label=curve.label, linewidth=1, **style)
        _scale(
            axes,
            width,
            _extent([y for curve in drawn for y in curve.y], typical_max=TYPICAL_MAX.get(panel, 0.0)),
            whole=x_axis is XAxis.ITERATIONS,
        )
        axes.set_xlabel(x_axis.value)
        axes.set_ylabel(panel.value)
        axes.set_title(f"{panel.value} over {x_axis.value}")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=100, metadata=FORMATS[kind])
    return content.getvalue()


def _extent(values: Sequence[float], *, typical_max: float = 0.0) -> tuple[float, float]:
    """Return the limits of an axis, with a margin on both sides.

    The range of a single value starts at zero, because ticks around the value would differ in insignificant digits.

    Args:
        values: the values, of which those that are not finite are ignored.
        typical_max: the least upper end of the range of a single value.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if low == high:
        low, high = min(low * 1.25, 0.0), max(high * 1.25, typical_max, 0.0)
        high = high if high > low else 1.0
    margin = (high - low) * MARGIN
    return low - margin, high + margin


def _scale(axes: Axes, width: tuple[float, float], height: tuple[float, float], *, whole: bool) -> None:
    """Set the limits, and integer ticks for iterations."""
    axes.set_xlim(*width)
    axes.set_ylim(*height)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))


def _curve(
    label: str, rows: Sequence[LogRow], values: Sequence[float], x_axis: XAxis, *, faint: bool
) -> Curve:
    x = tuple(float(row.iteration) if x_axis is XAxis.ITERATIONS else row.seconds for row in rows)
    return Curve(label=label, x=x, y=tuple(values), faint=faint)
