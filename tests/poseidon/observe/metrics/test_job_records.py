"""The records of a job: from events to JSON, with names of their own and without numbers that
JSON does not have.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from poseidon.observe.metrics.job_records import (
    LATEST_S,
    LONGEST_LINE,
    decode_record,
    encode_record,
    last_values,
    progress_record,
    test_record,
    train_record,
)
from poseidon.observe.metrics.progress import JobProgress

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


WRITTEN: dict[str, dict[str, Any]] = {
    "start": {"job": "lenet-1", "addresses": {"10.0.0.2": "node1"}, "script": True},
    "train": {"iteration": 100, "loss": 1.5, "rate": 0.01, "outputs": {"loss": 1.5, "a": None}},
    "test": {"iteration": 100, "net": 0, "outputs": {"accuracy": 0.5}},
    "progress": {"iteration": 1, "max_iter": 9, "loss": None, "rate": 2.5, "images_rate": 0.0},
    "worker": {"index": 0, "client": 1, "host": "node1", "iteration": 7, "waited_s": 0.5, "read_s": 0, "host_busy": 0.1, "sending_s": {"10.0.0.2": 0.25}, "most_lead": None, "gpu": {"busy": 0.5}},
    "shard": {"index": 0, "client": 1, "host": "node1", "queue": 3, "busy_s": 0.5, "stalled_s": 0.0, "bytes_in": 9, "bytes_out": 2, "sending_s": {}},
    "snapshot": {"iteration": 5, "path": "/x_iter_5.solverstate"},
    "end": {"outcome": "finished", "iteration": None},
}  # fmt: skip
"""The fields of each kind that are read."""
HOSTILE: list[Any] = [
    *(math.nan, math.inf, -math.inf, -1, -0.5, 1e301, 10**400, True, "1", "<b>", "x" * 5000, [1]),
    *({"a": "b"}, {"a": math.nan}, {"a": [1]}, {"a" * 5000: 1.0}),
]
"""No field takes all of these values; none takes most."""


def line_of(record: object) -> bytes:
    return json.dumps(record).encode()


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_record_is_read_as_it_was_written(kind: str) -> None:
    record = {"kind": kind, "time": 2.5, **WRITTEN[kind]}
    assert decode_record(line_of({**record, "of_a_later_version": 1})) == record


@pytest.mark.parametrize(("kind", "field"), [(kind, name) for kind in WRITTEN for name in WRITTEN[kind]])  # fmt: skip
def test_a_value_of_another_type_or_range_makes_no_record(kind: str, field: str) -> None:
    taken = []
    for value in HOSTILE:
        record = decode_record(line_of({"kind": kind, "time": 1, **WRITTEN[kind], field: value}))
        if record is not None:
            taken.append(record[field])
    text = ["1", "<b>"]
    values = [-1, -0.5]
    legal = {
        **dict.fromkeys(("job", "host", "path", "outcome"), text),
        **dict.fromkeys(("loss", "rate"), values if kind == "train" else []),
        "addresses": [{"a": "b"}],
        "script": [True],
    }
    if (kind, field) == ("progress", "loss"):
        legal["loss"] = values
    assert taken == legal.get(field, [])


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[", b"[1, 2]", b"null", b"7", b"{}", b"\x00\xff\xfe", b"[" * 100_000),
        *(b'{"a":' * 100_000, b'{"kind": "end", "time": %s}' % (b"9" * 5000)),
        *(b'{"kind": "end", "time": NaN, "outcome": ""}', b'{"kind": ["end"], "time": 1}'),
        line_of({"kind": "nosuch", "time": 1}),
        line_of({"kind": "end", "outcome": "x"}),
        line_of({"kind": "end", "outcome": "x", "time": 2 * LATEST_S}),
        line_of({"kind": "end", "outcome": "x", "time": -1}),
        line_of({"kind": "end", "outcome": "x", "time": 1, "more": "y" * LONGEST_LINE}),
    ],
)
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert decode_record(line) is None


def test_the_last_value_of_each_curve() -> None:
    train = {"kind": "train", "time": 1.0, "iteration": 5, "outputs": {"loss": 1.5}}
    test = {"kind": "test", "time": 1.0, "iteration": 6, "net": 0, "outputs": {"accuracy": 0.5}}
    lines = [line_of({"kind": "start", "time": 0.0, "job": "j"}), line_of(train), line_of(test)]
    lines.append(line_of({**train, "iteration": 7, "outputs": {"loss": None}}))
    of_solver = last_values(filter(None, map(decode_record, lines)))
    assert of_solver == {"train loss": (7, None), "test 0 accuracy": (6, 0.5)}
    lines[0] = line_of({"kind": "start", "time": 0.0, "job": "j", "script": True})
    assert list(last_values(filter(None, map(decode_record, lines)))) == ["loss", "test 0 accuracy"]
