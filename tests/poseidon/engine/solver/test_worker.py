"""What a worker tells its launcher of its progress."""

from __future__ import annotations

import io
import json

from poseidon.engine.averages import SmoothedLoss
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.solver.checkpoint import Progress
from poseidon.engine.solver.worker import ProgressReporter


def test_a_job_that_is_at_its_end_already_says_where_that_is() -> None:
    outlet = io.StringIO()
    start = Progress(iteration=20, losses=((0.5, 0.25),))
    ProgressReporter(LauncherConnection(io.StringIO(), outlet), 20, 100, start).report()
    sent = json.loads(outlet.getvalue())
    assert (sent["iteration"], sent["max_iter"], sent["loss"]) == (20, 20, 0.375)


def test_an_iteration_is_told_in_place_of_the_beginning_and_once() -> None:
    outlet = io.StringIO()
    reporter = ProgressReporter(
        LauncherConnection(io.StringIO(), outlet), 20, 100, Progress(iteration=4, losses=((0.5,),))
    )
    reporter(5, SmoothedLoss(1, (0.25,)))
    reporter.report()
    assert [json.loads(line)["iteration"] for line in outlet.getvalue().splitlines()] == [5]


def test_the_launcher_hears_of_a_test_and_of_the_iteration_before_it() -> None:
    outlet = io.StringIO()
    reporter = ProgressReporter(
        LauncherConnection(io.StringIO(), outlet), 20, 100, Progress(iteration=4, losses=((0.5,),))
    )
    reporter.test(1, 7)
    reporter.test(2, 7)  # too soon after the first
    sent = [json.loads(line) for line in outlet.getvalue().splitlines()]
    assert [
        (line["iteration"], line["loss"], line.get("tested"), line.get("to_test")) for line in sent
    ] == [
        (4, 0.5, None, None),
        (4, 0.5, 1, 7),
    ]
