"""The log file of a training: names, columns, and a log that goes on."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from poseidon.caffe2 import experiment_util
from poseidon.caffe2.experiment_util import ModelTrainerLog, read_log

COLUMNS = (
    "time_spent,cumulative_time_spent,input_count,cumulative_input_count,cumulative_batch_count,inputs_per_sec,"
    "accuracy,epoch,learning_rate,loss,test_accuracy"
)
VALUES = {"epoch": 0, "loss": 0.5, "accuracy": 0.75, "test_accuracy": -1, "learning_rate": 0.1}


class Recorder(experiment_util.ExternalLogger):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def set_runtime_args(self, runtime_args: Any) -> None:
        self.got.append(runtime_args)

    def log(self, log_dict: Mapping[str, Any]) -> None:
        self.got.append(dict(log_dict))


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day, by hand, in a folder of its own."""
    now = [1000.0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("poseidon.caffe2.experiment_util.time.time", lambda: now[0])
    return now


def test_the_file_is_that_of_caffe2(clock: list[float]) -> None:
    arguments, recorder = argparse.Namespace(num_labels=2), Recorder()
    log = ModelTrainerLog("resnet50_gpu1_b32_L2_lr0.10_v2", arguments, [recorder])
    assert re.fullmatch(r"resnet50_gpu1_b32_L2_lr0\.10_v2_\d{8}_\d{6}\.log", log.filename)
    for count in (64, 96):
        clock[0] += 4
        log.log(input_count=count, batch_count=count // 32 - 1, additional_values=VALUES)
    assert Path(log.filename).read_text().splitlines() == [
        "# Namespace(num_labels=2)",
        COLUMNS,
        "4.0,4.0,64,64,1,16.0,0.75,0,0.1,0.5,-1",
        "4.0,8.0,32,96,2,8.0,0.75,0,0.1,0.5,-1",
    ]
    assert recorder.got[0] is arguments
    assert [row["input_count"] for row in recorder.got[1:]] == [64, 32]


def test_a_log_goes_on(clock: list[float]) -> None:
    first = ModelTrainerLog("run", "first")
    clock[0] += 4
    first.log(64, 1, VALUES)
    clock[0] += 1000
    second = ModelTrainerLog("run", "second", continued=first.filename)
    clock[0] += 2
    second.log(96, 2, VALUES)
    assert second.filename == first.filename
    lines = Path(first.filename).read_text().splitlines()
    assert lines[3:] == ["# second", "2.0,6.0,32,96,2,16.0,0.75,0,0.1,0.5,-1"]
    assert [row["cumulative_input_count"] for row in read_log(first.filename)] == ["64", "96"]


def test_rows_of_no_time_have_no_rate() -> None:
    log = ModelTrainerLog("run", "")
    log.log(3, 0, {})
    assert read_log(log.filename)[0]["inputs_per_sec"] == "0.0"
