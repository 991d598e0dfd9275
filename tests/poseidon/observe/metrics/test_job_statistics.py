from __future__ import annotations

import json
from pathlib import Path

import pytest

from poseidon.errors import JobError
from poseidon.observe.metrics.job_statistics import (
    JobStatistics,
    TensorStatistics,
    WorkerStatistics,
    decode_statistics,
    encode_statistics,
    parsed,
    read_statistics,
)
from ps_server.statistics import ShardStatistics

WORKER = WorkerStatistics(
    iterations=4,
    tensors=(
        TensorStatistics(
            name="fc.0",
            scheme="ps",
            bytes_out=40,
            bytes_in=44,
            waited_s=0.25,
            hidden_s=1,
            held_back=0.5,
        ),
        TensorStatistics(name="fc.1", scheme="svb"),
    ),
    other_bytes_out=7,
)
SHARD = ShardStatistics(
    bytes_in=1, bytes_out=2, messages_in=3, updates=5, busy_s=0.5, memory_bytes=4096
)
JOB = JobStatistics(job="lenet-1", workers={0: WORKER, 10: WORKER, 2: WORKER}, shards={0: SHARD})


def test_the_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    path.write_text(encode_statistics(JOB), encoding="utf-8")
    read = read_statistics(path)
    assert read == JOB
    assert list(read.workers) == [0, 2, 10]


def test_unknown_fields_of_an_event_are_left_out() -> None:
    event = {
        "event": "statistics",
        "colour": "red",
        **json.loads(encode_statistics(JOB))["shards"]["0"],
    }
    assert parsed(ShardStatistics, event) == SHARD


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"iterations": 3},
        {"iterations": 3, "tensors": 5},
        {"iterations": 3, "tensors": [5]},
        {"iterations": "3", "tensors": []},
        {"iterations": -3, "tensors": []},
        {"iterations": True, "tensors": []},
        {"tensors": []},
        {"iterations": 3, "tensors": [{"name": 3}]},
        {"iterations": 3, "tensors": [{"scheme": "ps"}]},
        {"iterations": 3, "tensors": [{"name": "a", "waited_s": float("nan")}]},
        {"iterations": 3, "tensors": [{"name": "a", "waited_s": None}]},
        {"iterations": 3, "tensors": [{"name": "a", "bytes_in": 1.5}]},
    ],
)
def test_what_a_worker_cannot_mean(said: dict[str, object]) -> None:
    assert parsed(WorkerStatistics, said) is None


@pytest.mark.parametrize("said", [{"bytes_in": "3"}, {"busy_s": float("inf")}, {"queue": -1}])
def test_what_a_shard_cannot_mean(said: dict[str, object]) -> None:
    assert parsed(ShardStatistics, said) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[]", "it has no job"),
        ('{"job": "a"}', "no list of processes"),
        ('{"job": "a", "workers": {}, "shards": {"x": {}}}', "process 'x'"),
        ('{"job": "a", "workers": {"0": 3}, "shards": {}}', "process '0'"),
        ("[" * 100_000, "does not hold statistics"),
    ],
)
def test_a_file_that_holds_something_else(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError, match=words) as caught:
        read_statistics(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        read_statistics(tmp_path / "statistics.json")


def test_an_empty_job_is_legal() -> None:
    assert decode_statistics(encode_statistics(JobStatistics(job="a"))) == JobStatistics(job="a")
