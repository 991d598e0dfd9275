"""`poseidon plot`: curves of loss and scores of one or more training logs, as PNG, SVG or PDF."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from poseidon.base.text_files import escaped
from poseidon.engine.snapshot_files import make_folder, write_atomically
from poseidon.errors import UsageError
from poseidon.launcher.job_folder import find_training_log, read_training_log
from poseidon.observe.metrics.curves import (
    CHARTS,
    FORMATS,
    Panel,
    XAxis,
    YScale,
    curves,
    draw,
    scores,
)


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw; 0 when the file is there."""
    kind = arguments.output.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise UsageError(
            f"-o {arguments.output}: expected a name that ends in .{', .'.join(FORMATS)}"
        )
    panels, against = _panels(arguments)
    found = [find_training_log(word) for word in arguments.logs or [None]]
    logs = [
        (name, read_training_log(path))
        for name, (_, path) in zip(_short_names(found), found, strict=True)
    ]
    if arguments.chart is None:
        panels = [*panels, *dict.fromkeys(panel for _, log in logs for panel in scores(log))]
    shown = [
        panel for panel in panels if any(curves(name, log, panel, against) for name, log in logs)
    ]
    if not shown:
        missing = " or ".join(panel.value for panel in panels if isinstance(panel, Panel))
        raise UsageError(f"the logs have no {missing} to draw")
    scale = YScale(arguments.scale)
    picture = draw(logs, shown, against, kind, smooth=arguments.smooth, scale=scale)
    make_folder(arguments.output.parent)
    write_atomically(arguments.output, picture)
    print(f"Wrote {arguments.output}")
    return 0


def _panels(arguments: argparse.Namespace) -> tuple[Sequence[Panel | str], XAxis]:
    if arguments.chart is None:
        return (Panel.LOSS, Panel.ACCURACY), XAxis(arguments.x)
    panel, against = CHARTS[int(arguments.chart)]
    return (panel,), against


def _short_names(logs: Sequence[tuple[str, Path]]) -> list[str]:
    """Names for the legend, with the folder where two files are called alike (worker_0.log)."""
    names = [name for name, _ in logs]
    return [
        escaped(f"{path.absolute().parent.name}/{path.name}" if names.count(name) > 1 else name)
        for name, path in logs
    ]
