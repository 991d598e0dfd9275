"""The netoutputs file: the original's layout, whole at every moment, cheap."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest

from poseidon.errors import JobError
from poseidon.observe.metrics.job_records import decode_record, encode_record
from poseidon.observe.metrics.netoutputs import WAIT_S, LoggedMeans, NetOutputs
from poseidon.observe.metrics.record import Output, TestRecord, TrainRecord


class Clock:
    """Moved by hand, and by `cost_s` at every reading."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.now = 0.0
        self.cost_s = cost_s

    def __call__(self) -> float:
        self.now += self.cost_s
        return self.now


def train(iteration: int, loss: float, weight: float = 1.0) -> TrainRecord:
    outputs = (Output(name="loss", value=loss, loss_weight=weight), Output(name="top", value=0.5))
    return TrainRecord(
        iteration=iteration, loss=loss * weight, elapsed_s=iteration / 4, outputs=outputs, rate=0.1
    )


def a_test(iteration: int, accuracy: float, net: int = 0, loss: float | None = None) -> TestRecord:
    outputs = (
        Output(name="accuracy", value=accuracy),
        Output(name="loss", value=1.5, loss_weight=2.0),
    )
    return TestRecord(
        iteration=iteration, net=net, elapsed_s=iteration / 4, outputs=outputs, loss=loss
    )


def test_layout(tmp_path: Path) -> None:
    sink = NetOutputs(tmp_path / "out" / "cifar", clock=Clock())
    assert sink.path == tmp_path / "out" / "cifar.netoutputs"
    sink.on_test(a_test(0, 0.1))
    sink.on_train(train(0, 2.302585, weight=0.5))
    sink.on_train(train(100, 1.5))
    sink.on_test(a_test(100, 0.25, net=1, loss=9.0))
    assert sink.path.read_text() == (
        "Iteration,time,loss,loss,top,\n"
        "0,0,1.15129,1.15129,0.5,\n"
        "100,25,1.5,1.5,0.5,\n"
        "\n"
        "Iteration,time,loss,accuracy,loss,\n"
        "0,0,3,0.1,1.5,\n"
        "\n"
        "Iteration,time,loss,accuracy,loss,\n"
        "100,25,9,0.25,1.5,\n"
    )
    wiki = NetOutputs(tmp_path / "out" / "cifar-netoutputs")
    assert wiki.path == tmp_path / "out" / "cifar-netoutputs"
    sink.close()
    sink.close()


def test_it_is_whole_after_every_record(tmp_path: Path) -> None:
    sink = NetOutputs(tmp_path / "a", clock=Clock())
    for iteration in range(50):
        sink.on_train(train(iteration, 1.0))
        assert sink.path.read_text().count("\n") == iteration + 2
    assert os.listdir(tmp_path) == ["a.netoutputs"]


def test_writing_takes_a_fiftieth_of_the_time_at_most(tmp_path: Path) -> None:
    clock = Clock(cost_s=1.0)
    sink = NetOutputs(tmp_path / "a", clock=clock)
    sink.on_train(train(0, 1.0))
    written_at = clock.now
    iteration = 0
    while sink.path.read_text().count("\n") == 2:
        iteration += 1
        sink.on_train(train(iteration, 1.0))
    # The write takes one reading of this clock; the next begins 49 later, with all that came
    # meanwhile.
    assert 49 <= clock.now - written_at <= 52
    assert sink.path.read_text().count("\n") == iteration + 2
    sink.on_train(train(iteration + 1, 1.0))
    assert sink.path.read_text().count("\n") == iteration + 2
    sink.close()
    assert sink.path.read_text().count("\n") == iteration + 3


def test_a_full_disk_is_reported_once_and_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = NetOutputs(tmp_path / "a", clock=Clock())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        sink.on_train(train(0, 1.0))
        sink.on_train(train(1, 1.0))
    sink.close()
    assert len(caplog.messages) == 1
    assert "a.netoutputs: No space left on device; training continues" in caplog.text
    assert sink.path.read_text().count("\n") == 3


def test_a_failed_write_leaves_the_last_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = NetOutputs(tmp_path / "a", clock=Clock())
    sink.on_train(train(0, 1.0))
    before = sink.path.read_text()

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(JobError, match=r"a.netoutputs: Read-only"):
            sink.on_train(train(1, 1.0))
    assert sink.path.read_text() == before
    assert os.listdir(tmp_path) == ["a.netoutputs"]
    sink.close()
    assert sink.path.read_text().count("\n") == 3


def write_rows(sink: NetOutputs, *, trains: bool, begin: int, end: int) -> None:
    for iteration in range(begin, end, 10):
        sink.on_test(a_test(iteration, iteration / 1000))
        sink.on_test(a_test(iteration, iteration / 2000, net=1))
        if trains:
            sink.on_train(train(iteration, 2.0 - iteration / 100))
    sink.close()


@pytest.mark.parametrize("trains", [True, False])
def test_a_job_that_goes_on_keeps_what_it_does_not_repeat(tmp_path: Path, trains: bool) -> None:
    write_rows(NetOutputs(tmp_path / "whole"), trains=trains, begin=0, end=60)
    write_rows(NetOutputs(tmp_path / "parted"), trains=trains, begin=0, end=40)
    write_rows(NetOutputs(tmp_path / "parted", resumed_at=30), trains=trains, begin=30, end=60)
    assert (tmp_path / "parted.netoutputs").read_bytes() == (
        tmp_path / "whole.netoutputs"
    ).read_bytes()


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"\n\n\n", b"nonsense\n1,2\n"])
def test_what_cannot_be_kept_is_replaced(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.netoutputs").write_bytes(content)
    write_rows(NetOutputs(tmp_path / "b"), trains=True, begin=30, end=60)
    write_rows(NetOutputs(tmp_path / "a", resumed_at=1), trains=True, begin=30, end=60)
    assert (tmp_path / "a.netoutputs").read_bytes() == (tmp_path / "b.netoutputs").read_bytes()


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
