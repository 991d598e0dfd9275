"""Tables of logs: Caffe's own, ours, and what is in no good order."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest

from poseidon.observe.metrics.training_log import as_csv, parse_log, script_log

HEAD = "I1231 23:59:50.000000  7 solver.cpp:1] "
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
        # as in Caffe's tool, the rate of the second row, before which the first was heard
        (0, 2, 0.001),
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


NAN, INF = math.nan, math.inf
NUMBERS = [
    *[("0.5", 0.5), ("-.5", -0.5), ("5.", 5.0), ("1", 1.0), ("87.3365", 87.3365)],
    *[("1e+06", 1e6), ("1.5e-005", 1.5e-5), ("1E+100", 1e100)],
    *[("nan", NAN), ("-nan", NAN), ("NaN", NAN), ("NaNQ", NAN), ("-nan(ind)", NAN)],
    *[("nan(snan)", NAN), ("nan(0x8000000000000)", NAN)],
    *[("inf", INF), ("-inf", -INF), ("+INF", INF), ("Infinity", INF)],
    *[("1.#QNAN", NAN), ("-1.#QNAN", NAN), ("1.#QNAN0", NAN), ("1.#SNAN", NAN), ("1.#R", NAN)],
    *[("-1.#IND", NAN), ("-1.#IND00", NAN), ("1.#IND", NAN), ("1.#INF", INF), ("1.#INF00", INF)],
    *[("-1.#INF", -INF), ("1.#J", INF), ("-1.#J", -INF), ("1.$", NAN)],
]
"""As glibc, Visual C++ and other libraries write them, with as many digits as asked for."""


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_a_number_of_any_system_is_read(text: str, value: float) -> None:
    lines = [
        f"{HEAD}Iteration 5, lr = {text}, m = 0.9",
        f"{HEAD}    Train net output #0: loss = {text} (* 1 = {text} loss)",
        f"{HEAD}    Train net output #1: score = {text}",
    ]
    (row,) = parse_log(lines, 2014).train
    assert row.outputs == {
        "loss": pytest.approx(value, nan_ok=True),
        "score": pytest.approx(value, nan_ok=True),
    }
    assert row.rate == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("text", ["1.2.3", "1.#QNAN(", "0x1", "1,5", "nano", "1e", "-", "many"])
def test_what_is_no_number_is_not_half_read(text: str) -> None:
    texts = (
        "Iteration 5",
        "    Train net output #0: a = 1",
        f"    Train net output #1: b = {text}",
    )
    (row,) = parse_log([HEAD + text for text in texts], 2014).train
    assert row.outputs == {"a": 1.0}


def test_values_of_one_name_are_columns() -> None:
    """A top of several values is as many lines; a line that is logged twice is one."""
    texts = (
        "Iteration 5, Testing net (#0)",
        *(f"    Test net output #{number}: score = {number}" for number in (0, 1, 1, 2)),
    )
    texts += (
        "    Test net output #3: loss = 5 (* 1 = 5 loss)",
        "    Test net output #4: loss = 6 (* 1 = 6 loss)",
    )
    texts += (
        "    Test net output #5: mean = 1",
        "Iteration 6, Testing net (#0)",
        "    Test net output #0: score = 7",
    )
    log = parse_log([HEAD + text for text in texts], 2014)
    assert as_csv(log.test).splitlines() == [
        "NumIters,Seconds,LearningRate,score[0],score[1],score[2],loss[0],loss[1],mean",
        "5.0,0.0,nan,0.0,1.0,2.0,5.0,6.0,1.0",
        "6.0,0.0,nan,7.0,,,,,",
    ]
    assert log.losses == {"loss[0]", "loss[1]"}


def test_newer_glog_writes_the_year() -> None:
    lines = LOG.replace("I12", "I201412").replace("I01", "I201501").splitlines()
    assert as_csv(parse_log(lines, 1970).train) == as_csv(parse_log(LOG.splitlines(), 2014).train)


@pytest.mark.parametrize("year", [2014, 2023, 2024, 1899])
@pytest.mark.parametrize(
    ("days", "seconds"),
    [
        (("0229", "0229"), [0, 60]),
        (("0228", "0229"), [0, 86460]),
        (("0228", "0229", "0301"), [0, 86460, 172860]),
        (("1231", "0229"), [0, 60 * 86400 + 60]),
    ],
)
def test_a_log_of_29_february_has_its_times(
    year: int, days: tuple[str, ...], seconds: list[float]
) -> None:
    """The year is not in the log, and the clock's may have no such day."""
    lines = [f"I{days[0]} 10:00:00.000000     1 solver.cpp:1] Solving net"]
    lines += [
        f"I{day} 10:0{min(n, 1)}:00.000000     1 solver.cpp:1] {text}"
        for n, day in enumerate(days)
        for text in (f"Iteration {n}, loss = 1", "    Train net output #0: loss = 1")
    ]
    assert [row.seconds for row in parse_log(lines, year).train] == seconds


def test_several_test_nets_have_rows_of_their_own() -> None:
    lines = [
        HEAD + text
        for text in (
            "Iteration 5, Testing net (#0)",
            "    Test net output #0: a = 1",
            "Iteration 5, Testing net (#1)",
            "    Test net output #0: b = 2",
            "    Test net output #1: c = 3",
        )
    ]
    log = parse_log(lines, 2014)
    assert [row.outputs for row in log.test] == [{"a": 1}, {"b": 2, "c": 3}]
    assert as_csv(log.test).splitlines()[0] == "NumIters,Seconds,LearningRate,a,b,c"


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


def test_a_script_has_the_rows_that_it_has_logged() -> None:
    """After a restart from iteration 2, whose values replace those after it."""

    def train(time: float, iteration: int, **outputs: float | None) -> dict[str, object]:
        return {"kind": "train", "time": time, "iteration": iteration, "outputs": outputs}

    log = script_log(
        [
            {"kind": "start", "time": 100.0},
            train(101.0, 1, loss=3.0, lr=0.5),
            train(102.0, 2, loss=2.0),
            train(102.0, 3, loss=9.0),
            train(103.0, 2, val_accuracy=0.5),
            {"kind": "start", "time": 110.0},
            train(111.0, 2, loss=2.5),
            train(112.0, 4, loss=None),
        ]
    )
    assert [(row.iteration, row.seconds, row.outputs) for row in log.train[:2]] == [
        (1, 1.0, {"loss": 3.0, "lr": 0.5}),
        (2, 11.0, {"loss": 2.5, "val_accuracy": 0.5}),
    ]
    assert [row.iteration for row in log.train] == [1, 2, 4]
    assert math.isnan(log.train[2].outputs["loss"])
    assert log.train[0].rate == 0.5
    assert math.isnan(log.train[1].rate)
    assert (log.losses, log.test, log.of_script) == (frozenset({"loss"}), (), True)
