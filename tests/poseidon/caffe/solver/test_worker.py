"""What a worker tells its launcher of its progress."""

from __future__ import annotations

import io
import json

from poseidon.caffe.solver.worker import ScoreReporter
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.observe.metrics.record import TestRecord, TrainRecord


def test_the_launcher_hears_of_the_last_displayed_iteration() -> None:
    """Those that follow another one too soon are left out, unless a test or the end comes next."""
    outlet = io.StringIO()
    reporter = ScoreReporter(LauncherConnection(io.StringIO(), outlet))
    for iteration in (0, 1, 2, 3):
        reporter.on_train(
            TrainRecord(iteration=iteration, loss=0.5, elapsed_s=1.0, outputs=(), rate=0.1)
        )
        if iteration == 2:
            reporter.on_test(TestRecord(iteration=2, net=0, elapsed_s=1.0, outputs=()))
    reporter.close()
    reporter.close()
    sent = [json.loads(line) for line in outlet.getvalue().splitlines()]
    assert [(line["event"], line["iteration"]) for line in sent] == [
        ("trained", 0), ("trained", 2), ("tested", 2), ("trained", 3),
    ]  # fmt: skip
