"""What a worker tells its launcher of its progress."""

from __future__ import annotations

import io
import json
from typing import Any

from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.work import ProgressReporter


def reporter(start: int = 0) -> tuple[ProgressReporter, io.StringIO]:
    outlet = io.StringIO()
    launcher = LauncherConnection(io.StringIO(), outlet)
    return ProgressReporter(launcher, lambda iteration: {"images": 100 * iteration}, start), outlet


def sent(outlet: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outlet.getvalue().splitlines()]


def test_a_job_that_is_at_its_end_already_says_where_that_is() -> None:
    report, outlet = reporter(start=20)
    report.report()
    assert [(one["iteration"], one["images"]) for one in sent(outlet)] == [(20, 2000)]


def test_an_iteration_is_told_in_place_of_the_beginning_and_once() -> None:
    report, outlet = reporter(start=4)
    report(5)
    report.report()
    assert [one["iteration"] for one in sent(outlet)] == [5]


def test_the_launcher_hears_of_a_test_and_of_the_iteration_before_it() -> None:
    report, outlet = reporter(start=4)
    report(4, tested=1, to_test=7)
    report(4, tested=2, to_test=7)  # too soon after the first
    found = [(one["iteration"], one.get("tested"), one.get("to_test")) for one in sent(outlet)]
    assert found == [(4, None, None), (4, 1, 7)]
