"""Tables of logs: Caffe's own, ours, and what is in no good order."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest

from poseidon.metrics.training_log import as_csv, parse_log

LOG = """\
Log file created at: 2014/12/31 23:59:50
W1231 23:59:49.000000  7 net.cpp:1] Iteration of something
I1231 23:59:50.000000  7 solver.cpp:160] Solving net
I1231 23:59:50.500000  7 solver.cpp:247] Iteration 0, Testing net (#0)
I1231 23:59:51.000000  7 solver.cpp:298]     Test net output #0: accuracy = 0.1
I1231 23:59:51.000000  7 solver.cpp:298]     Test net output #1: loss = 2.5 (* 1 = 2.5 loss)
I1231 23:59:52.000000  7 solver.cpp:191] Iteration 0, loss = 2.5
I1231 23:59:52.000000  7 solver.cpp:206]     Train net output #0: loss = 2.4e+0 (* 1 = 2.4 loss)
I1231 23:59:52.000000  7 solver.cpp:403] Iteration 0, lr = 1e-3
garbage, Iteration 77, lr = 5
I0101 00:00:02.000000  7 solver.cpp:191] Iteration 10, loss = 2
I0101 00:00:02.000000  7 solver.cpp:206]     Train net output #0: loss = nan (* 1 = nan loss)
I0101 00:00:02.000000  7 solver.cpp:403] Iteration 10, lr = 0.0005
I0101 00:00:03.000000  7 solver.cpp:247] Iteration 10, Testing net (#0)
I0101 00:00:03.000000  7 solver.cpp:298]     Test net output #0: accuracy = 0.5
"""


def test_rows() -> None:
    log = parse_log(LOG.splitlines(), 2014)
    assert [(row.iteration, row.seconds, row.rate) for row in log.train] == [
        (0, 2, 0.001),  # as in Caffe's tool, the rate of the second row, before which the first was heard
        (10, 12, 0.001),
    ]
    assert log.train[0].outputs == {"loss": 2.4}
    assert math.isnan(log.train[1].outputs["loss"])
    assert [(row.iteration, row.seconds, row.outputs) for row in log.test] == [
        (0, 1, {"accuracy": 0.1, "loss": 2.5}),
        (10, 13, {"accuracy": 0.5}),
    ]
    assert log.losses == {"loss"}


def test_a_table_is_caffes() -> None:
    table = as_csv(parse_log(LOG.splitlines(), 2014).test)
    assert (
        table
        == "NumIters,Seconds,LearningRate,accuracy,loss\r\n0.0,1.0,0.0005,0.1,2.5\r\n10.0,13.0,0.0005,0.5,\r\n"
    )


def test_several_test_nets_have_rows_of_their_own() -> None:
    head = "I1231 23:59:50.000000  7 solver.cpp:1] "
    lines = [
        head + text
        for text in (
            "Iteration 5, Testing net (#0)",
            "    Test net output #0: a = 1",
            "Iteration 5, Testing net (#1)",
            "    Test net output #0: b = 2",
            "    Test net output #1: b = 3",
        )
    ]
    log = parse_log(lines, 2014)
    assert [row.outputs for row in log.test] == [{"a": 1}, {"b": 3}]
    assert as_csv(log.test).splitlines()[0] == "NumIters,Seconds,LearningRate,a,b"


def test_caffes_log_of_2014(shared: Path) -> None:
    path = shared / "data" / "models" / "cifar10_quick_everpeace_V1" / "train_log.txt"
    log = parse_log(path.read_text(encoding="utf-8").splitlines(), 2014)
    scores = {row.iteration: row.outputs["accuracy"] for row in log.test}
    assert (scores[0], scores[500], scores[5000]) == (0.0926, 0.5551, 0.7491)
    assert [row.iteration for row in log.train][:3] == [0, 100, 200]
    assert log.test[0].seconds == pytest.approx(6.264315)
    assert {row.rate for row in log.train} == {0.001, 0.0001}
    assert log.losses == {"loss"}


def test_our_log(repository: Path) -> None:
    path = repository / "benchmarks" / "results" / "logs" / "cifar10_quick_lr1_4000-5000.log"
    log = parse_log(path.read_text(encoding="utf-8").splitlines(), 2026)
    assert log.test[-1].outputs == {"accuracy": 0.7522, "loss": 0.754774}
    rows = list(csv.DictReader(io.StringIO(as_csv(log.train))))
    assert (rows[-1]["NumIters"], rows[-1]["LearningRate"], rows[-1]["loss"]) == (
        "4900.0",
        "0.0001",
        "0.413973",
    )
