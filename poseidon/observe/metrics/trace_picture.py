"""A chart of one iteration of a worker: its activities, and below them the communication of each
tensor.
"""

from __future__ import annotations

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from poseidon.observe.metrics.curves import FORMATS
from poseidon.observe.metrics.trace_iteration import COMPUTE, Bar, IterationView

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
OVERLAPPED = "#8fc9b5"
MOST_TENSORS = 40
"""With more tensors, those with the longest waits are shown, then those with the longest
communication.
"""
_HIDDEN_FORMATS = ("begin", "finish", "gather")
"""Activities of the training thread that would hide others."""


def draw_iteration(view: IterationView, *, title: str, kind: str = "svg") -> bytes:
    """Draw the chart.

    Args:
        kind: one of `FORMATS`.
    """
    longest = sorted(
        view.transfers, key=lambda one: (-round(one.waited_ms), one.begin_ms - one.arrival_ms)
    )
    longest = longest[:MOST_TENSORS]
    shown = [transfer for transfer in view.transfers if transfer in longest]
    rows = sorted({bar.row for bar in view.bars})
    height = 1.6 + 0.42 * len(rows) + 0.2 * len(shown)
    with matplotlib.rc_context(
        {"svg.hashsalt": "poseidon", "svg.fonttype": "none", "font.size": 8}
    ):
        figure = Figure(figsize=(10, height), layout="constrained")
        heights = [0.42 * len(rows) + 0.3, 0.2 * max(len(shown), 1) + 0.3]
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        _draw_rows(above, view, rows)
        _draw_transfers(below, view, [transfer.name for transfer in shown])
        above.set_title(title, fontsize=9)
        below.set_xlabel("milliseconds from the beginning of the iteration")
        below.set_xlim(0, view.until_ms)
        handles = [
            Patch(color=color, label=name)
            for name, color in COLORS.items()
            if name not in _HIDDEN_FORMATS
        ]
        handles.append(Patch(color=OVERLAPPED, label="communication while training continues"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
        out = io.BytesIO()
        figure.savefig(out, format=kind, metadata=FORMATS[kind])
    return out.getvalue()


def _draw_rows(axis: Axes, view: IterationView, rows: list[int]) -> None:
    for position, row in enumerate(rows):
        for bar in view.bars:
            if bar.row == row and not (row == COMPUTE and bar.kind in _HIDDEN_FORMATS):
                _draw_bar(axis, position, bar)
    axis.set_yticks(range(len(rows)), [view.rows.get(row, str(row)) for row in rows])
    axis.invert_yaxis()
    axis.axvline(view.length_ms, color="#555555", linewidth=0.7, linestyle=":")
    axis.tick_params(axis="y", length=0)


def _draw_bar(axis: Axes, position: int, bar: Bar) -> None:
    thin = bar.kind == "wait"  # inside the bar of a layer
    height, lift = (0.4, 0.2) if thin else (0.8, 0.4)
    axis.broken_barh(
        [(bar.begin_ms, bar.end_ms - bar.begin_ms)],
        (position - lift, height),
        facecolors=COLORS.get(bar.kind, OTHERS),
        linewidth=0,
        zorder=3 if thin else 2,
    )


def _draw_transfers(axis: Axes, view: IterationView, names: list[str]) -> None:
    by_name = {transfer.name: transfer for transfer in view.transfers}
    for position, name in enumerate(names):
        transfer = by_name[name]
        duration_ms = transfer.arrival_ms - transfer.begin_ms
        axis.broken_barh(
            [(transfer.begin_ms, duration_ms)], (position - 0.35, 0.7), facecolors=OVERLAPPED
        )
        axis.broken_barh(
            [(transfer.used_ms - transfer.waited_ms, transfer.waited_ms)],
            (position - 0.35, 0.7),
            facecolors=COLORS["wait"],
            zorder=3,
        )
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axis.axvline(view.length_ms, color="#555555", linewidth=0.7, linestyle=":")
    axis.tick_params(axis="y", length=0)
