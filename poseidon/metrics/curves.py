"""Curves of training logs, drawn without a screen.

Law: one drawing, one `Figure` of its own; nothing of pyplot's shared state. Chart types are those of Caffe's
tools/extra/plot_training_log.py.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from matplotlib.figure import Figure

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
    """The curves that a log has for a panel.

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
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for curve in (curve for name, log in logs for curve in curves(name, log, panel, against)):
            style: dict[str, Any] = {"alpha": 0.6} if curve.faint else {"marker": "."}
            axes.plot(curve.x, curve.y, label=curve.label, linewidth=1, **style)
        axes.set_xlabel(against.value)
        axes.set_ylabel(panel.value)
        axes.set_title(f"{panel.value} over {against.value}")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=100, metadata=KINDS[kind])
    return content.getvalue()


def _curve(
    label: str, rows: Sequence[LogRow], values: Sequence[float], against: Against, *, faint: bool
) -> Curve:
    x = tuple(float(row.iteration) if against is Against.ITERATIONS else row.seconds for row in rows)
    return Curve(label=label, x=x, y=tuple(values), faint=faint)
