"""Curves of training logs, drawn without a screen.

Law: one drawing, one `Figure` of its own; nothing of pyplot's shared state. Chart types are those of Caffe's
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


class Against(Enum):
    """What the horizontal axis shows."""

    ITERATIONS = "iterations"
    """Iterations finished."""
    SECONDS = "seconds"
    """Seconds since the start."""


class Panel(Enum):
    """What a panel shows, by the words of Caffe's chart types."""

    ACCURACY = "accuracy"
    """Outputs of the test nets that do not weigh in the loss."""
    LOSS = "loss"
    """Losses of train and test nets."""
    TEST_LOSS = "test loss"
    """Losses of the test nets."""
    TRAIN_LOSS = "train loss"
    """Losses of the train net."""
    RATE = "learning rate"
    """The learning rate."""


CHARTS = {
    0: (Panel.ACCURACY, Against.ITERATIONS),
    1: (Panel.ACCURACY, Against.SECONDS),
    2: (Panel.TEST_LOSS, Against.ITERATIONS),
    3: (Panel.TEST_LOSS, Against.SECONDS),
    4: (Panel.RATE, Against.ITERATIONS),
    5: (Panel.RATE, Against.SECONDS),
    6: (Panel.TRAIN_LOSS, Against.ITERATIONS),
    7: (Panel.TRAIN_LOSS, Against.SECONDS),
}
"""Caffe's numbers of chart types."""

INCHES = (9.0, 5.0)
USUAL = {Panel.ACCURACY: 1.0}
"""The upper end of a panel's axis where one value alone is shown."""
MARGIN = 0.04
"""Of an axis, on both sides."""
KINDS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
"""Kinds of files, each with what is said in it; no dates, so that the same log gives the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a panel; `faint` for the many noisy points of a train net."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    faint: bool


def curves(name: str, log: TrainingLog, panel: Panel, against: Against) -> list[Curve]:
    """Return the curves that a log has for a panel.

    Args:
        name: of the log, for the legend.
        log: its tables.
        panel: what to show.
        against: what over.
    """
    if panel is Panel.RATE:
        rows = log.train or log.test
        return (
            [_curve(f"{name}: rate", rows, [row.rate for row in rows], against, faint=False)] if rows else []
        )
    wanted_losses = panel is not Panel.ACCURACY
    found = []
    for words, rows, panels in (
        ("train", log.train, (Panel.LOSS, Panel.TRAIN_LOSS)),
        ("test", log.test, (Panel.LOSS, Panel.TEST_LOSS, Panel.ACCURACY)),
    ):
        outputs = dict.fromkeys(output for row in rows for output in row.outputs)
        for output in outputs if panel in panels else ():
            if (output in log.losses) is wanted_losses:
                having = [row for row in rows if output in row.outputs]
                values = [row.outputs[output] for row in having]
                label = f"{name}: {words} {output}"
                found.append(_curve(label, having, values, against, faint=words == "train"))
    return found


def draw(
    logs: Sequence[tuple[str, TrainingLog]], panels: Sequence[Panel], against: Against, kind: str
) -> bytes:
    """Draw panels side by side.

    Args:
        logs: names and tables.
        panels: from left to right.
        against: the horizontal axis of all.
        kind: one of `KINDS`.

    Returns:
        the content of a file of that kind.
    """
    figure = Figure(figsize=(INCHES[0] * len(panels), INCHES[1]), layout="constrained")
    shown = [[curve for name, log in logs for curve in curves(name, log, panel, against)] for panel in panels]
    width = _extent([x for drawn in shown for curve in drawn for x in curve.x])
    for place, (panel, drawn) in enumerate(zip(panels, shown, strict=True)):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for curve in drawn:
            style: dict[str, Any] = {"alpha": 0.6} if curve.faint else {}
            if not curve.faint or len(curve.x) == 1:  # a line of one point is nothing
                style["marker"] = "."
            axes.plot(curve.x, curve.y, label=curve.label, linewidth=1, **style)
        _scale(
            axes,
            width,
            _extent([y for curve in drawn for y in curve.y], usual=USUAL.get(panel, 0.0)),
            whole=against is Against.ITERATIONS,
        )
        axes.set_xlabel(against.value)
        axes.set_ylabel(panel.value)
        axes.set_title(f"{panel.value} over {against.value}")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=100, metadata=KINDS[kind])
    return content.getvalue()


def _extent(values: Sequence[float], *, usual: float = 0.0) -> tuple[float, float]:
    """Limits of an axis, with a margin on both sides. Of a single value a range from zero: around the value alone the ticks
    would differ in digits that mean nothing.

    Args:
        values: that are drawn; those that are not finite have no place on an axis.
        usual: the upper end of such a range, at least.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if low == high:
        low, high = min(low * 1.25, 0.0), max(high * 1.25, usual, 0.0)
        high = high if high > low else 1.0
    margin = (high - low) * MARGIN
    return low - margin, high + margin


def _scale(axes: Axes, width: tuple[float, float], height: tuple[float, float], *, whole: bool) -> None:
    """Set the limits, and ticks at whole numbers where an axis counts."""
    axes.set_xlim(*width)
    axes.set_ylim(*height)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))


def _curve(
    label: str, rows: Sequence[LogRow], values: Sequence[float], against: Against, *, faint: bool
) -> Curve:
    x = tuple(float(row.iteration) if against is Against.ITERATIONS else row.seconds for row in rows)
    return Curve(label=label, x=x, y=tuple(values), faint=faint)
