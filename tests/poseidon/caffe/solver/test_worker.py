"""What a worker tells its launcher of its progress."""

from __future__ import annotations

import io
import json

from poseidon.caffe.solver.averages import SmoothedLoss
from poseidon.caffe.solver.worker import ProgressReporter, ScoreReporter
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.observe.metrics.record import TestRecord, TrainRecord


def test_a_job_that_is_at_its_end_already_says_where_that_is() -> None:
    outlet = io.StringIO()
    reporter = ProgressReporter(LauncherConnection(io.StringIO(), outlet), 20, 100)
    reporter.begin(20, SmoothedLoss(2, (0.5, 0.25)))
    reporter.report()
    sent = json.loads(outlet.getvalue())
    assert (sent["iteration"], sent["max_iter"], sent["loss"]) == (20, 20, 0.375)


def test_an_iteration_is_told_in_place_of_the_beginning_and_once() -> None:
    outlet = io.StringIO()
    reporter = ProgressReporter(LauncherConnection(io.StringIO(), outlet), 20, 100)
    reporter.begin(4, SmoothedLoss(1, (0.5,)))
    reporter(5, SmoothedLoss(1, (0.25,)))
    reporter.report()
    assert [json.loads(line)["iteration"] for line in outlet.getvalue().splitlines()] == [5]


def test_the_launcher_hears_of_a_test_and_of_the_iteration_before_it() -> None:
    outlet = io.StringIO()
    reporter = ProgressReporter(LauncherConnection(io.StringIO(), outlet), 20, 100)
    reporter.begin(4, SmoothedLoss(1, (0.5,)))
    reporter.test(1, 7)
    reporter.test(2, 7)  # too soon after the first
    sent = [json.loads(line) for line in outlet.getvalue().splitlines()]
    assert [
        (line["iteration"], line["loss"], line.get("tested"), line.get("to_test")) for line in sent
    ] == [
        (4, 0.5, None, None),
        (4, 0.5, 1, 7),
    ]


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
