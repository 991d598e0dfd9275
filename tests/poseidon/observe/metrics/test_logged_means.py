"""Means over workers of what a script logs, and when they are recorded."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from poseidon.observe.metrics.job_records import decode_record, encode_record
from poseidon.observe.metrics.logged_means import WAIT_S, LoggedMeans


def logged(iteration: object, **values: object) -> dict[str, object]:
    return {"event": "logged", "iteration": iteration, "values": values}


def due(means: LoggedMeans, now: float = 0.0, **how: bool) -> list[tuple[int, dict[str, Any]]]:
    return [(record["iteration"], record["outputs"]) for record in means.due(now, **how)]


def test_a_mean_is_recorded_once_all_workers_have_gone_on() -> None:
    means = LoggedMeans(2)
    means.add(0, logged(1, loss=1.0), 0.0)
    means.add(0, logged(2, loss=5.0), 0.0)
    means.add(1, logged(1, loss=2.0), 0.0)
    assert due(means) == []
    means.add(1, logged(2, loss=7.0), 0.0)
    assert due(means) == [(1, {"loss": 1.5})]
    assert due(means) == []
    assert due(means, everything=True) == [(2, {"loss": 6.0})]


def test_a_script_may_train_once_more() -> None:
    means = LoggedMeans(2)
    for iteration in (1, 2, 1, 2):
        means.add(0, logged(iteration, loss=iteration), 0.0)
    assert due(means) == []
    means.add(1, logged(1, loss=3.0), 0.0)
    means.add(1, logged(2, loss=4.0), 0.0)
    assert due(means) == [(1, {"loss": 2.0})]
    means.add(1, logged(1, loss=5.0), 0.0)
    assert due(means) == [(2, {"loss": 3.0})]
    assert due(means, everything=True) == [(1, {"loss": 3.0}), (2, {"loss": 2.0})]


def test_a_worker_that_logs_nothing_is_not_waited_for() -> None:
    means = LoggedMeans(2)
    means.add(0, logged(10, accuracy=0.5), 0.0)
    means.add(0, logged(10, accuracy=1.0), 1.0)
    assert due(means, 1.0 + WAIT_S - 0.1) == []
    assert due(means, 1.0 + WAIT_S) == [(10, {"accuracy": 0.75})]
    means.add(1, logged(10, accuracy=0.0), 20.0)
    assert due(means, everything=True) == [], "too late"
    means.add(1, logged(10, loss=1.0), 20.0)
    assert due(means, everything=True) == [(10, {"loss": 1.0})], "of another name it is in time"


def test_a_mean_does_not_depend_on_the_order() -> None:
    values = (0.1, 1e16, -1e16, 0.3)
    found = set()
    for order in itertools.permutations(enumerate(values)):
        means = LoggedMeans(4)
        for worker, value in order:
            means.add(worker, logged(1, loss=value), 0.0)
        ((_, outputs),) = due(means, everything=True)
        found.add(outputs["loss"])
    assert found == {0.1}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 10**400, "x"])
def test_what_is_not_finite_is_null(value: object) -> None:
    means = LoggedMeans(2)
    means.add(0, logged(1, loss=1.0, rate=1e300), 0.0)
    means.add(1, logged(1, loss=value, rate=1e300), 0.0)
    (record,) = means.due(0.0, everything=True)
    assert record["outputs"] == {"loss": None, "rate": 1e300}
    assert decode_record(encode_record({"time": 1.0, **record}).encode()) is not None


@pytest.mark.parametrize("changes", [{"iteration": "1"}, {"iteration": -1}, {"values": [1]}])
def test_an_event_that_is_not_valid_adds_nothing(changes: dict[str, object]) -> None:
    means = LoggedMeans(1)
    means.add(0, {**logged(1, loss=1.0), **changes}, 0.0)
    assert due(means, everything=True) == []


def test_loss_and_rate_have_fields_of_their_own() -> None:
    means = LoggedMeans(1)
    means.add(0, logged(1, loss=1.0, lr=0.5, a=2), 0.0)
    means.add(0, logged(2, a=3), 0.0)
    assert list(means.due(0.0, everything=True)) == [
        {
            "kind": "train",
            "iteration": 1,
            "loss": 1.0,
            "rate": 0.5,
            "outputs": {"loss": 1.0, "lr": 0.5, "a": 2.0},
        },
        {"kind": "train", "iteration": 2, "outputs": {"a": 3.0}},
    ]
