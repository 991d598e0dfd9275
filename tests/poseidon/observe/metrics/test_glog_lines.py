"""Caffe's lines, and what a reader that follows Caffe's parser recovers from them."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from poseidon.base.glog import setup
from poseidon.observe.metrics import glog_lines
from poseidon.observe.metrics import glog_lines as lines
from poseidon.observe.metrics.glog_lines import GlogSink, merge_logs, number
from poseidon.observe.metrics.record import Output, TestRecord, TrainRecord

TRAIN = TrainRecord(
    iteration=100,
    loss=1.640664,
    elapsed_s=141.7621,
    outputs=(Output(name="loss", value=1.640664, loss_weight=1.0),),
    rate=0.001,
)
TEST = TestRecord(
    iteration=200,
    net=0,
    elapsed_s=272.4,
    outputs=(
        Output(name="accuracy", value=0.4592),
        Output(name="loss", value=1.495163, loss_weight=1.0),
    ),
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.001, "0.001"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (1.0, "1"),
        (0.0, "0"),
        (2.302585, "2.30259"),
        (123456.0, "123456"),
        (1234567.0, "1.23457e+06"),
        (1e100, "1e+100"),
        (0.998938, "0.998938"),
        (-0.5, "-0.5"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
        (-float("nan"), "-nan"),
    ],
)
def test_numbers_look_as_a_cpp_stream_prints_them(value: float, text: str) -> None:
    assert number(value) == text


def test_the_lines_that_users_know() -> None:
    assert [line.text for line in glog_lines.train(TRAIN)] == [
        "Iteration 100, loss: 1.64066, time: 141.762",
        "    Train net output #0: loss = 1.64066 (* 1 = 1.64066 loss)",
        "Iteration 100, lr = 0.001",
    ]
    assert glog_lines.testing(200, 0).text == "Iteration 200, Testing net (#0)"
    assert [line.text for line in glog_lines.tested(TEST)] == [
        "    Test net output #0: accuracy = 0.4592",
        "    Test net output #1: loss = 1.49516 (* 1 = 1.49516 loss)",
    ]
    assert glog_lines.solving("CIFAR10_quick").text == "Solving CIFAR10_quick"
    assert [line.text for line in glog_lines.last(TRAIN)] == [
        "Iteration 100, loss = 1.64066, time: 141.762",
        "    Train net output #0: loss = 1.64066 (* 1 = 1.64066 loss)",
    ]
    assert glog_lines.done().text == "Optimization Done."
    assert [line.text for line in glog_lines.snapshotting("a.caffemodel", "a.solverstate")] == [
        "Snapshotting to a.caffemodel",
        "Snapshotting solver state to a.solverstate",
    ]


def test_loss_weights_and_the_test_loss() -> None:
    outputs = (Output(name="loss1", value=2.0, loss_weight=0.3), Output(name="top", value=0.25))
    record = TestRecord(iteration=1, net=1, elapsed_s=1.0, outputs=outputs, loss=0.6)
    assert [line.text for line in glog_lines.tested(record)] == [
        "Test loss: 0.6",
        "    Test net output #0: loss1 = 2 (* 0.3 = 0.6 loss)",
        "    Test net output #1: top = 0.25",
    ]


# What follows is a reader of its own, after the expressions that Caffe's log parser uses.
ITERATION = re.compile(r"Iteration (\d+)")
TRAIN_OUTPUT = re.compile(r"Train net output #(\d+): (\S+) = ([\.\deE+-]+)")
TEST_OUTPUT = re.compile(r"Test net output #(\d+): (\S+) = ([\.\deE+-]+)")
RATE = re.compile(r"lr = ([-+]?[0-9]*\.?[0-9]+([eE]?[-+]?[0-9]+)?)")


class Reading:
    """What such a reader finds in a log."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.start: datetime | None = None
        self.times: list[datetime] = []
        self.train: dict[int, dict[str, float]] = {}
        self.test: dict[int, dict[str, float]] = {}
        self.rates: dict[int, float] = {}
        iteration = -1
        for line in lines:
            if "Solving" in line:
                self.start = moment(line)
            if found := ITERATION.search(line):
                iteration = int(found[1])
            if iteration < 0:
                continue
            self.times.append(moment(line))
            if found := RATE.search(line):
                self.rates[iteration] = float(found[1])
            if found := TRAIN_OUTPUT.search(line):
                self.train.setdefault(iteration, {})[found[2]] = float(found[3])
            if found := TEST_OUTPUT.search(line):
                self.test.setdefault(iteration, {})[found[2]] = float(found[3])


def moment(line: str) -> datetime:
    day, time = line.split()[:2]
    return datetime.strptime(f"2015{day[1:]} {time}", "%Y%m%d %H:%M:%S.%f")


def test_everything_is_recovered_from_the_log() -> None:
    stream = io.StringIO()
    with setup(stream=stream):
        sink = GlogSink(logging.getLogger("poseidon.engine"))
        sink.write(glog_lines.solving("CIFAR10_quick"))
        for iteration, rate in ((0, 0.1), (100, 0.001), (200, 1e-05)):
            sink.begin_test(iteration, 0)
            outputs = (
                Output(name="accuracy", value=iteration / 1000),
                Output(name="loss", value=1e-9, loss_weight=1.0),
            )
            sink.on_test(TestRecord(iteration=iteration, net=0, elapsed_s=1.0, outputs=outputs))
            loss = Output(name="loss", value=1234567.0, loss_weight=1.0)
            sink.on_train(
                TrainRecord(
                    iteration=iteration, loss=2.5, elapsed_s=1.0, outputs=(loss,), rate=rate
                )
            )
        sink.write(glog_lines.done())
        sink.close()
    read = Reading(iter(stream.getvalue().splitlines()))
    assert read.start is not None
    assert all(timedelta(0) <= time - read.start < timedelta(minutes=1) for time in read.times)
    assert read.rates == {0: 0.1, 100: 0.001, 200: 1e-05}
    assert read.test == {i: {"accuracy": i / 1000, "loss": 1e-9} for i in (0, 100, 200)}
    assert read.train == {i: {"loss": 1234570.0} for i in (0, 100, 200)}


def test_the_reader_reads_a_log_of_caffe_itself(shared: Path) -> None:
    """The reader above is only worth something if it reads the real thing."""
    path = shared / "data" / "models" / "cifar10_quick_everpeace_V1" / "train_log.txt"
    glog = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ \S+:\d+\] ")
    lines = [line for line in path.read_text().splitlines() if glog.match(line)]
    read = Reading(iter(lines))
    assert read.test[3500]["accuracy"] == 0.6934
    assert read.rates[4900] == 0.0001
    assert read.train[100] == {"loss": 1.68744}
    # And our lines are Caffe's own, letter by letter, where the two have the same ones.
    ours = [
        line.text
        for line in (
            glog_lines.testing(500, 0),
            glog_lines.solving("CIFAR10_quick"),
            glog_lines.done(),
        )
    ]
    test = TestRecord(
        iteration=500,
        net=0,
        elapsed_s=0.0,
        outputs=(
            Output(name="accuracy", value=0.5551),
            Output(name="loss", value=1.26168, loss_weight=1.0),
        ),
    )
    ours += [line.text for line in glog_lines.tested(test)]
    texts = {line.partition("] ")[2] for line in lines}
    assert [text for text in ours if text not in texts] == []


def line(second: int, text: str, severity: str = "I") -> str:
    return f"{severity}1126 20:40:{second:02d}.731869 29444 solver.cpp:294] {text}"


def test_lines_come_in_the_order_of_their_times() -> None:
    logs = {
        "worker 0": [line(1, "a"), line(5, "b"), line(5, "c")],
        "worker 1": [line(2, "d"), line(5, "e", "W"), line(6, "f")],
    }
    order = [(name[-1], text[-1]) for name, text in merge_logs(logs)]
    assert order == [("0", "a"), ("1", "d"), ("0", "b"), ("0", "c"), ("1", "e"), ("1", "f")]


def test_a_line_without_a_time_stays_behind_the_one_before_it() -> None:
    logs = {
        "0": ["no head", line(3, "a"), "Traceback", "  in b", line(4, "c")],
        "1": [line(3, "d")],
    }
    assert [text[-4:] for _, text in merge_logs(logs)] == [
        "head",
        "94] a"[-4:],
        "back",
        "in b",
        "4] d",
        "4] c",
    ]


def test_a_clock_that_is_set_back_changes_no_order() -> None:
    logs = {"0": [line(9, "a"), line(2, "b")], "1": [line(5, "c"), line(9, "d")]}
    assert [text[-1] for _, text in merge_logs(logs)] == ["c", "a", "b", "d"]


def test_nothing_of_nothing() -> None:
    assert list(merge_logs({})) == []
    assert list(merge_logs({"0": []})) == []


def test_scores() -> None:
    accuracy = Output(name="accuracy", value=0.7491, loss_weight=0)
    loss = Output(name="loss", value=0.748170001, loss_weight=2)
    assert lines.running(100).text == "Running for 100 iterations."
    assert lines.batch_line(7, accuracy).text == "Batch 7, accuracy = 0.7491"
    assert lines.batch_line(7, loss).text == "Batch 7, loss = 0.74817"
    assert [line.text for line in lines.score_lines(1.49634, (accuracy, loss))] == [
        "Loss: 1.49634",
        "accuracy = 0.7491",
        "loss = 0.74817 (* 2 = 1.49634 loss)",
    ]


def test_devices() -> None:
    assert [line.text for line in lines.using("cpu")] == ["Use CPU."]
    assert [line.text for line in lines.using("cuda:1", gpu_name="K20")] == [
        "Use GPU with device ID 1",
        "GPU device name: K20",
    ]


def test_times() -> None:
    conv = lines.LayerTime(name="conv1", forward_ms=24.5, backward_ms=0.0123456789)
    inner = lines.LayerTime(name="inception_3a/1x1", forward_ms=1, backward_ms=0)
    times = lines.NetTime(
        layers=(conv, inner), forward_ms=30, backward_ms=12.5, total_ms=85, iterations=2
    )
    assert [line.text for line in lines.benchmark_ends(times)] == [
        "Average time per layer: ",
        "     conv1\tforward: 24.5 ms.",
        "     conv1\tbackward: 0.0123457 ms.",
        "inception_3a/1x1\tforward: 1 ms.",
        "inception_3a/1x1\tbackward: 0 ms.",
        "Average Forward pass: 30 ms.",
        "Average Backward pass: 12.5 ms.",
        "Average Forward-Backward: 42.5 ms.",
        "Total Time: 85 ms.",
        "*** Benchmark ends ***",
    ]
