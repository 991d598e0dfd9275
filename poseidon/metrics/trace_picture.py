"""One iteration of a worker as a picture: what was done when, above how long each tensor was on its way."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from poseidon.metrics.curves import KINDS
from poseidon.metrics.trace_iteration import COMPUTE, Bar, IterationView

COLORS = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "wait": "#d62728",
    "begin": "#333333",
    "send": "#009e73",
    "receive": "#56b4e9",
    "apply": "#cc79a7",
}
OTHERS = "#bbbbbb"
ON_THE_WAY = "#8fc9b5"
MOST_TENSORS = 40
"""Of more, those are shown that were waited for longest, then those that were on their way longest."""
_UNSHOWN = ("begin", "finish", "gather")
"""Of the training thread these only hide what is below them."""


def draw_iteration(view: IterationView, *, title: str, kind: str = "svg") -> bytes:
    """Return the picture.

    Args:
        view: the iteration.
        title: of the picture.
        kind: one of `KINDS`.
    """
    ways = sorted(view.ways, key=lambda way: (-round(way.waited_ms), way.begin_ms - way.arrival_ms))
    ways = ways[:MOST_TENSORS]
    shown = [way for way in view.ways if way in ways]
    rows = sorted({bar.row for bar in view.bars})
    height = 1.6 + 0.42 * len(rows) + 0.2 * len(shown)
    with matplotlib.rc_context({"svg.hashsalt": "poseidon", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(10, height), layout="constrained")
        heights = [0.42 * len(rows) + 0.3, 0.2 * max(len(shown), 1) + 0.3]
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        _draw_rows(above, view, rows)
        _draw_ways(below, view, [way.name for way in shown])
        above.set_title(title, fontsize=9)
        below.set_xlabel("milliseconds from the beginning of the iteration")
        below.set_xlim(0, view.until_ms)
        handles = [Patch(color=color, label=name) for name, color in COLORS.items() if name not in _UNSHOWN]
        handles.append(Patch(color=ON_THE_WAY, label="on its way while training goes on"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
        out = io.BytesIO()
        figure.savefig(out, format=kind, metadata=KINDS[kind])
    return out.getvalue()


def _draw_rows(axis: Axes, view: IterationView, rows: list[int]) -> None:
    for place, row in enumerate(rows):
        for bar in view.bars:
            if bar.row == row and not (row == COMPUTE and bar.kind in _UNSHOWN):
                _draw_bar(axis, place, bar)
    axis.set_yticks(range(len(rows)), [view.rows.get(row, str(row)) for row in rows])
    axis.invert_yaxis()
    axis.axvline(view.length_ms, color="#555555", linewidth=0.7, linestyle=":")
    axis.tick_params(axis="y", length=0)


def _draw_bar(axis: Axes, place: int, bar: Bar) -> None:
    thin = bar.kind == "wait"  # it lies within a layer's
    height, lift = (0.4, 0.2) if thin else (0.8, 0.4)
    axis.broken_barh(
        [(bar.begin_ms, bar.end_ms - bar.begin_ms)],
        (place - lift, height),
        facecolors=COLORS.get(bar.kind, OTHERS),
        linewidth=0,
        zorder=3 if thin else 2,
    )


def _draw_ways(axis: Axes, view: IterationView, names: list[str]) -> None:
    by_name = {way.name: way for way in view.ways}
    for place, name in enumerate(names):
        way = by_name[name]
        way_ms = way.arrival_ms - way.begin_ms
        axis.broken_barh([(way.begin_ms, way_ms)], (place - 0.35, 0.7), facecolors=ON_THE_WAY)
        axis.broken_barh(
            [(way.used_ms - way.waited_ms, way.waited_ms)],
            (place - 0.35, 0.7),
            facecolors=COLORS["wait"],
            zorder=3,
        )
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axis.axvline(view.length_ms, color="#555555", linewidth=0.7, linestyle=":")
    axis.tick_params(axis="y", length=0)
