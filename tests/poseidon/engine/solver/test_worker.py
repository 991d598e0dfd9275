"""What a worker tells its launcher of its progress."""

from __future__ import annotations

import io
import json

from poseidon.engine.averages import SmoothedLoss
from poseidon.engine.control import Control
from poseidon.engine.solver.checkpoint import Progress
from poseidon.engine.solver.worker import ProgressTeller


def test_a_job_that_is_at_its_end_already_says_where_that_is() -> None:
    heard = io.StringIO()
    start = Progress(iteration=20, losses=(0.5, 0.25))
    ProgressTeller(Control(outlet=heard), 20, 100, start).tell()
    told = json.loads(heard.getvalue())
    assert (told["iteration"], told["max_iter"], told["loss"]) == (20, 20, 0.375)


def test_an_iteration_is_told_in_place_of_the_beginning_and_once() -> None:
    heard = io.StringIO()
    teller = ProgressTeller(Control(outlet=heard), 20, 100, Progress(iteration=4, losses=(0.5,)))
    teller(5, SmoothedLoss(1, (0.25,)))
    teller.tell()
    assert [json.loads(line)["iteration"] for line in heard.getvalue().splitlines()] == [5]


def test_the_launcher_hears_of_a_test_and_of_the_iteration_before_it() -> None:
    heard = io.StringIO()
    teller = ProgressTeller(Control(outlet=heard), 20, 100, Progress(iteration=4, losses=(0.5,)))
    teller.test(1, 7)
    teller.test(2, 7)  # too soon after the first
    told = [json.loads(line) for line in heard.getvalue().splitlines()]
    assert [(line["iteration"], line["loss"], line.get("tested"), line.get("to_test")) for line in told] == [
        (4, 0.5, None, None),
        (4, 0.5, 1, 7),
    ]
