"""What a worker tells its launcher of its progress."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest

from poseidon.engine.document import TrainingDocument
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.work import ProgressReporter, TrainingWork
from ps_server import PeerLost, PeerUnreachable, ServerError, SpecError


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


class Idle(TrainingWork[TrainingDocument]):
    def run(self) -> Mapping[str, object]:
        return {}

    def location(self, error: BaseException) -> str:
        return ""


@pytest.mark.parametrize(
    ("error", "rewind", "copies", "pauses"),
    [
        (PeerLost("worker 0 has gone"), -1, 1, True),
        (PeerLost("worker 0 has gone"), -1, 0, False),
        (SpecError("the definitions differ"), 5, 1, False),
        (PeerUnreachable("no answer"), -1, 1, False),  # nothing to continue from
        (PeerUnreachable("no answer"), 5, 1, True),  # a host has joined, or returned
        (PeerUnreachable("no answer"), 5, 0, False),
    ],
)
def test_a_worker_pauses_where_the_job_may_continue_from_memory(
    error: ServerError, rewind: int, copies: int, pauses: bool
) -> None:
    document = TrainingDocument(job="j", output="o", rewind=rewind, copies=copies)
    launcher = LauncherConnection(io.StringIO(), io.StringIO())
    assert Idle(document, launcher).pauses_after(error) is pauses
