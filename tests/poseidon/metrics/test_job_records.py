"""The records of a job: from events to JSON, with names of their own and without numbers that
JSON does not have.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from poseidon.metrics.job_records import encode_record, progress_record, test_record, train_record
from poseidon.metrics.progress import JobProgress

TRAINED: dict[str, Any] = {
    "event": "trained", "iteration": 100, "loss": 1.5, "rate": 0.01, "outputs": [["loss", 1.5], ["accuracy", 0.25]],
}  # fmt: skip


def test_a_displayed_iteration() -> None:
    assert train_record(TRAINED) == {
        "kind": "train", "iteration": 100, "loss": 1.5, "rate": 0.01, "outputs": {"loss": 1.5, "accuracy": 0.25},
    }  # fmt: skip


def test_the_scores_of_a_test_come_as_text() -> None:
    event = {
        "event": "tested",
        "iteration": 500,
        "net": 1,
        "scores": [["accuracy", "0.7"], ["loss", "nan"]],
    }
    assert test_record(event) == {
        "kind": "test", "iteration": 500, "net": 1, "outputs": {"accuracy": 0.7, "loss": None},
    }  # fmt: skip


def test_values_of_one_blob_have_names_of_their_own() -> None:
    record = train_record({**TRAINED, "outputs": [["p", 0.1], ["loss", 2.0], ["p", 0.2]]})
    assert record is not None
    assert record["outputs"] == {"p[0]": 0.1, "loss": 2.0, "p[1]": 0.2}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "much"])
def test_what_is_no_number_is_null(value: object) -> None:
    record = train_record({**TRAINED, "loss": value, "outputs": [["loss", value]]})
    assert record is not None
    assert json.loads(encode_record(record))["outputs"] == {"loss": None}
    assert record["loss"] is None


@pytest.mark.parametrize(
    "changes",
    [{"iteration": "7"}, {"outputs": None}, {"outputs": [["loss"]]}, {"outputs": ["loss"]}],
)
def test_an_event_that_is_not_valid_gives_no_record(changes: dict[str, object]) -> None:
    assert train_record({**TRAINED, **changes}) is None
    assert test_record({**TRAINED, **changes}) is None


def test_progress() -> None:
    progress = JobProgress(
        iteration=10, max_iter=100, images=1000, loss=0.5, rate=2.0, images_rate=200.0
    )
    assert progress_record(progress) == {
        "kind": "progress", "iteration": 10, "max_iter": 100, "loss": 0.5, "rate": 2.0, "images_rate": 200.0,
    }  # fmt: skip
