"""Plots of training logs as image files.

Law: each plot has its own `Figure`; pyplot's global state is not used. The chart types are as in
Caffe's tools/extra/plot_training_log.py.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from poseidon.observe.metrics.record import RATES, is_loss, score
from poseidon.observe.metrics.training_log import LogRow, TrainingLog


class XAxis(Enum):
    """The quantity on the horizontal axis."""

    ITERATIONS = "iterations"
    """Finished iterations."""
    SECONDS = "seconds"
    """Seconds since the start."""


class YScale(Enum):
    """The scale of the vertical axis."""

    AUTO = "auto"
    """Logarithmic for losses and rates that are positive and span a factor of 30."""
    LINEAR = "linear"
    """Linear."""
    LOG = "log"
    """Logarithmic; values that are not positive are not shown."""


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
LEGEND_ROW_INCHES = 0.2
AUTO_PARTS = 40
"""The moving average of a curve has this part of its points, unless it is given."""
LOGARITHMIC = frozenset({Panel.LOSS, Panel.TRAIN_LOSS, Panel.TEST_LOSS, Panel.RATE})
"""The panels whose axis may be logarithmic."""
SPAN = 30.0
"""The least quotient of the largest and the smallest value on a logarithmic axis."""
MOST_MARKERS = 100
"""The most points of a curve that has markers."""
DASHES = ("-", "--", ":", "-.")
MOST_COLUMNS = 3
ACCURACIES = ("accuracy", "acc")
"""The scores of scripts in the panel of accuracy."""
TYPICAL_MAX: dict[Panel | str, float] = {Panel.ACCURACY: 1.0}
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
    """A line of a panel; `faint` for the many noisy points of a train net, which are smoothed."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    faint: bool


def scores(log: TrainingLog) -> list[str]:
    """Return the further panels of a script's log: one for each score (`logged_names.score`)
    besides accuracy.
    """
    names = dict.fromkeys(output for row in log.train for output in row.outputs)
    found = dict.fromkeys(score(name) for name in names if log.of_script and not _is_usual(name))
    return list(found)


def _is_usual(name: str) -> bool:
    """Return whether a value that a script logs has its place in one of `Panel`."""
    return is_loss(name) or name in RATES or score(name) in ACCURACIES


def _of_script(name: str, log: TrainingLog, panel: Panel | str, x_axis: XAxis) -> list[Curve]:
    """Return the curves of what a script has logged, for a panel of losses or scores."""
    found = []
    for output in dict.fromkeys(output for row in log.train for output in row.outputs):
        belongs = score(output) == panel and not _is_usual(output)
        if panel in (Panel.LOSS, Panel.TRAIN_LOSS):
            belongs = is_loss(output)
        elif panel is Panel.ACCURACY:
            belongs = score(output) in ACCURACIES and not is_loss(output)
        if belongs:
            having = [row for row in log.train if output in row.outputs]
            values = [row.outputs[output] for row in having]
            faint = len(having) > MOST_MARKERS
            found.append(_curve(f"{name}: {output}", having, values, x_axis, faint=faint))
    return found


def curves(name: str, log: TrainingLog, panel: Panel | str, x_axis: XAxis) -> list[Curve]:
    """Return the curves of a log for a panel.

    Args:
        name: the name of the log, for the legend.
        panel: text: one of `scores`.
    """
    if panel is Panel.RATE:
        rated = [row for row in log.train or log.test if not math.isnan(row.rate)]
        rates = [row.rate for row in rated]
        return [_curve(f"{name}: rate", rated, rates, x_axis, faint=False)] if rated else []
    if log.of_script:
        return _of_script(name, log, panel, x_axis)
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


def draw(
    logs: Sequence[tuple[str, TrainingLog]],
    panels: Sequence[Panel | str],
    x_axis: XAxis,
    kind: str,
    *,
    smooth: int | None = None,
    scale: YScale = YScale.AUTO,
) -> bytes:
    """Draw panels, up to three side by side, each with its legend below. Return the content of a
    file of that format.

    Args:
        kind: one of `FORMATS`.
        smooth: the points of the moving average of a train net's curve; 1: none; None: a fortieth
            of the curve.
    """
    shown = [
        [
            (number, curve)
            for number, (name, log) in enumerate(logs)
            for curve in curves(name, log, panel, x_axis)
        ]
        for panel in panels
    ]
    legend = max((len(drawn) for drawn in shown), default=0)
    columns = min(len(panels), MOST_COLUMNS)
    rows = math.ceil(len(panels) / MOST_COLUMNS)
    figure = Figure(
        figsize=(INCHES[0] * columns, (INCHES[1] + LEGEND_ROW_INCHES * legend) * rows),
        layout="constrained",
    )
    width = _extent([x for drawn in shown for _, curve in drawn for x in curve.x])
    for index, (panel, drawn) in enumerate(zip(panels, shown, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        smoothed = [
            _draw_curve(axes, curve, style, smooth) for curve, style in _styled(drawn, len(logs))
        ]
        values = [value for each in smoothed for value in each]
        title = panel.value if isinstance(panel, Panel) else panel
        logarithmic = _is_logarithmic(scale, panel, values)
        raw = [y for _, curve in drawn for y in curve.y]
        if logarithmic:
            axes.set_yscale("log")
            axes.set_ylim(*_log_extent(raw))
        else:
            axes.set_ylim(*_extent(raw, typical_max=TYPICAL_MAX.get(panel, 0.0)))
        axes.set_xlim(*width)
        if x_axis is XAxis.ITERATIONS:
            axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        axes.set_xlabel(x_axis.value)
        axes.set_ylabel(f"{title} (logarithmic)" if logarithmic else title)
        axes.set_title(f"{title} over {x_axis.value}")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(
                fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False
            )
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=100, metadata=FORMATS[kind])
    return content.getvalue()


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the finite values around each one; near the ends the window is smaller
    on both sides.

    Args:
        window: the number of values around each one, with itself.
    """
    sums = list(
        accumulate((value if math.isfinite(value) else 0.0 for value in values), initial=0.0)
    )
    counts = list(accumulate((math.isfinite(value) for value in values), initial=0))
    means = []
    for index in range(len(values)):
        half = min(window // 2, index, len(values) - 1 - index)
        first, last = index - half, index + half + 1
        count = counts[last] - counts[first]
        means.append((sums[last] - sums[first]) / count if count else math.nan)
    return means


def _styled(
    drawn: Sequence[tuple[int, Curve]], logs: int
) -> Iterator[tuple[Curve, dict[str, Any]]]:
    """Yield each curve with its style: of several logs, each has a colour, and its curves differ
    by their dashes.
    """
    counts: Counter[int] = Counter()
    for index, (number, curve) in enumerate(drawn):
        dashes = DASHES[counts[number] % len(DASHES)] if logs > 1 else DASHES[0]
        counts[number] += 1
        yield curve, {"color": f"C{number if logs > 1 else index}", "linestyle": dashes}


def _draw_curve(
    axes: Axes, curve: Curve, style: Mapping[str, Any], smooth: int | None
) -> Sequence[float]:
    """Draw a curve; a faint one in the background of its moving average.

    Return the values in the foreground.
    """
    window = 1
    if curve.faint:
        window = smooth if smooth is not None else len(curve.y) // AUTO_PARTS
    if window > 1:
        axes.plot(curve.x, curve.y, linewidth=1, alpha=0.25, **style)
        values: Sequence[float] = moving_average(curve.y, window)
        label = f"{curve.label}, mean of {window} points"
        axes.plot(curve.x, values, label=label, linewidth=1.5, **style)
        return values
    # A line through one point is invisible.
    few = len(curve.x) <= MOST_MARKERS and not curve.faint
    marker = "." if few or len(curve.x) == 1 else ""
    axes.plot(curve.x, curve.y, label=curve.label, linewidth=1.2, marker=marker, **style)
    return curve.y


def _is_logarithmic(scale: YScale, panel: Panel | str, values: Sequence[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    if scale is YScale.AUTO:
        return panel in LOGARITHMIC and bool(finite) and max(finite) >= SPAN * min(finite) > 0
    return scale is YScale.LOG and any(value > 0 for value in finite)


def _log_extent(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of a logarithmic axis; values that are not positive are ignored."""
    positive = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    factor = max((max(positive) / min(positive)) ** MARGIN, 1.1)
    return min(positive) / factor, max(positive) * factor


def _extent(values: Sequence[float], *, typical_max: float = 0.0) -> tuple[float, float]:
    """Return the limits of an axis, with a margin on both sides.

    The range of a single value starts at zero, because ticks around the value would differ in
    insignificant digits.

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


def _curve(
    label: str, rows: Sequence[LogRow], values: Sequence[float], x_axis: XAxis, *, faint: bool
) -> Curve:
    x = tuple(float(row.iteration) if x_axis is XAxis.ITERATIONS else row.seconds for row in rows)
    return Curve(label=label, x=x, y=tuple(values), faint=faint)
