"""The state of a job from its records: curves, loads, rows, and files that are cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from poseidon.observe.dashboard.view import MOST_PANELS, MOST_POINTS, SILENT_S, JobView, Series
from poseidon.observe.metrics.job_records import decode_record

START = {
    "time": 100.0,
    "kind": "start",
    "job": "lenet-1",
    "workers": 2,
    "shards": 1,
    "addresses": {"10.0.0.2": "node1"},
}


def worker(time: float, index: int, iteration: int, waited_s: float, **more: Any) -> dict[str, Any]:
    return {
        "time": time, "kind": "worker", "index": index, "client": index, "host": f"node{index}",
        "iteration": iteration, "waited_s": waited_s, "read_s": 0.0, "still_s": 0.0, "sending_s": {}, **more,
    }  # fmt: skip


def view(*records: dict[str, Any]) -> JobView:
    made = JobView()
    for record in records:
        known = decode_record(json.dumps(record).encode())
        if known is not None:
            made.add(known)
    return made


def test_curves_of_training_and_tests() -> None:
    made = view(
        START,
        {
            "time": 101.0,
            "kind": "train",
            "iteration": 20,
            "loss": 2.0,
            "rate": 0.1,
            "outputs": {"loss": 2.1},
        },
        {
            "time": 102.0,
            "kind": "train",
            "iteration": 40,
            "loss": None,
            "rate": 0.1,
            "outputs": {"loss": None},
        },
        {"time": 103.0, "kind": "test", "iteration": 40, "net": 0, "outputs": {"accuracy": 0.5}},
        {
            "time": 104.0,
            "kind": "progress",
            "iteration": 40,
            "max_iter": 100,
            "loss": 1.0,
            "rate": 2.0,
            "images_rate": 50.0,
        },
    )
    assert {name: series.points for name, series in made.series.items()} == {
        "loss": [(20, 2.0)], "learning rate": [(20, 0.1), (40, 0.1)], "train loss": [(20, 2.1)],
        "test 0 accuracy": [(40, 0.5)], "images/s": [(40, 50.0)],
    }  # fmt: skip
    summary = made.summary(105.0, running=True)
    assert (summary["state"], summary["iteration"], summary["eta_s"]) == ("running", 40, 30.0)


def test_loads_are_measured_between_two_records() -> None:
    made = view(
        START,
        worker(110.0, 0, 0, 1.0),
        worker(110.0, 1, 0, 0.0, sending_s={"10.0.0.2": 1.0}),
        worker(120.0, 0, 50, 7.0),
        worker(120.0, 1, 48, 2.0, sending_s={"10.0.0.2": 6.0}, read_s=1.0),
    )
    (first, second), shards = made.loads()
    assert (first.iterations, first.read) == (5.0, 0.0)
    assert first.waited == pytest.approx(0.6)
    assert first.own_s == pytest.approx(0.08)
    assert second.sending == {"node1": 0.5}, "an address has the name of the machinefile"
    assert second.read == pytest.approx(0.1)
    assert shards == []
    rows = made.summary(121.0, running=True)["workers"]
    assert [(row["rank"], row["iteration"], row["lead"], row["silent"]) for row in rows] == [
        (0, 50, 2, False), (1, 48, 0, False),
    ]  # fmt: skip


def test_a_worker_without_an_iteration_has_no_own_time() -> None:
    made = view(START, worker(110.0, 0, 7, 1.0), worker(120.0, 0, 7, 1.0))
    (row,) = made.summary(121.0, running=True)["workers"]
    assert (row["waited"], row["own_s"]) == (0.0, None)


@pytest.mark.parametrize(
    ("bounds", "leads"),
    [((None, None), [0, 2]), ((0, 0), [0, 0]), ((1, 1), [0, 1]), ((0, None), [0, 2])],
)
def test_a_lead_is_within_the_bound(bounds: tuple[int | None, ...], leads: list[int]) -> None:
    """It is an estimate, whenever a worker reports; without a bound of both there is none."""
    first, second = bounds
    made = view(
        START,
        worker(110.0, 0, 0, 0.0, most_lead=first),
        worker(114.0, 1, 40, 0.0, most_lead=second),
        worker(120.0, 0, 100, 0.0, most_lead=first),
        worker(124.0, 1, 143, 0.0, most_lead=second),
    )
    assert [row["lead"] for row in made.summary(125.0, running=True)["workers"]] == leads


@pytest.mark.parametrize(
    ("busy_s", "stalled_s", "busy"),
    [(4.0, 1.0, 0.4), (1.0, 9.0, 0.9), (0.0, 0.0, 0.0), (20.0, 0.0, 1.0)],
)
def test_a_shard_that_has_no_processor_is_busy(
    busy_s: float, stalled_s: float, busy: float
) -> None:
    record = {
        "time": 110.0, "kind": "shard", "index": 0, "host": "node0", "busy_s": 1.0, "stalled_s": 2.0, "sending_s": {},
    }  # fmt: skip
    later = {**record, "time": 120.0, "busy_s": 1.0 + busy_s, "stalled_s": 2.0 + stalled_s}
    _, (shard,) = view(START, record, later).loads()
    assert shard.busy == pytest.approx(busy)


def test_only_the_last_seconds_count() -> None:
    made = view(
        START,
        *(worker(100.0 + 5 * n, 0, 10 * n, 0.0 if n < 10 else 5.0 * (n - 9)) for n in range(21)),
    )
    ((load,), _) = made.loads()
    assert load.waited == pytest.approx(1.0), "it waited all the time in the last twenty seconds"


def test_a_worker_of_which_nothing_comes_is_silent_while_the_job_runs() -> None:
    made = view(START, worker(110.0, 0, 5, 0.0))
    late = 110.0 + SILENT_S + 1
    assert made.summary(late, running=True)["workers"][0]["silent"]
    assert not made.summary(late, running=False)["workers"][0]["silent"]


def test_states() -> None:
    end = {"time": 200.0, "kind": "end", "outcome": "stopped", "iteration": 5}
    assert JobView().summary(0.0, running=True)["state"] == "starting"
    assert JobView().summary(0.0, running=False)["state"] == "never started"
    assert view(START).summary(0.0, running=False)["state"] == "lost"
    assert view(START, end).summary(0.0, running=False)["state"] == "stopped"
    again = view(START, end, {**START, "time": 300.0})
    assert again.summary(0.0, running=True)["state"] == "running"
    assert [event["text"] for event in again.summary(0.0, running=True)["events"]] == [
        "the job was started", "the job stopped at iteration 5", "the job was restarted",
    ]  # fmt: skip


def test_a_script_without_steps_ends_without_an_iteration() -> None:
    end = {"time": 200.0, "kind": "end", "outcome": "finished", "iteration": None}
    summary = view(START, end).summary(0.0, running=False)
    assert [event["text"] for event in summary["events"]] == [
        "the job was started",
        "the job finished",
    ]


def test_a_job_that_has_ended_shows_its_last_iteration() -> None:
    progress = {"time": 101.0, "kind": "progress", "iteration": 0, "max_iter": 20, "loss": 1.0, "rate": 0.0, "images_rate": 0.0}  # fmt: skip
    end = {"time": 102.0, "kind": "end", "outcome": "finished", "iteration": 20}
    summary = view(START, progress, end).summary(103.0, running=False)
    assert (summary["iteration"], summary["max_iter"]) == (20, 20)
    assert summary["bottleneck"]["sentence"] == "The job was too short to name what limits it."


@pytest.mark.parametrize(
    "record",
    [
        {}, {"kind": "train"}, {"time": "now", "kind": "start"}, {"time": 1.0, "kind": "worker", "index": None},
        {"time": 1.0, "kind": "worker", "index": 0, "waited_s": "much"}, {"time": 1.0, "kind": "of a later version"},
        {"time": 1.0, "kind": "train", "iteration": 1, "loss": 1.0, "rate": 1.0, "outputs": 7},
        {"time": 1.0, "kind": "shard", "index": 0, "sending_s": []},
    ],
)  # fmt: skip
def test_a_record_that_is_not_as_expected_is_skipped(record: dict[str, Any]) -> None:
    made = view(START, record)
    made.summary(2.0, running=True)


def test_a_long_curve_is_thinned_out_and_keeps_its_range() -> None:
    series = Series()
    for x in range(10 * MOST_POINTS):
        series.add(x, 0.0)
    assert len(series.points) <= MOST_POINTS
    assert series.points[0][0] == 0
    assert series.points[-1][0] > 9.9 * MOST_POINTS
    assert series.revision > 0


def test_a_restart_replaces_the_points_that_are_repeated() -> None:
    series = Series()
    for x, y in ((10, 1.0), (20, 2.0), (30, 3.0), (20, 4.0), (30, 5.0)):
        series.add(x, y)
    assert series.points == [(10, 1.0), (20, 4.0), (30, 5.0)]


def test_curves_of_a_script_have_its_names_and_a_panel_for_each_score() -> None:
    made = view(
        {**START, "script": True},
        {
            "time": 101.0,
            "kind": "train",
            "iteration": 20,
            "loss": 2.0,
            "rate": 0.1,
            "outputs": {"loss": 2.0, "lr": 0.1, "val/loss": 3.0, "accuracy": 0.5, "grad_norm": 9},
        },
        {"time": 102.0, "kind": "train", "iteration": 20, "outputs": {"val_accuracy_epoch": 0.25}},
        {"time": 103.0, "kind": "train", "iteration": 40, "outputs": {"loss": None}},
    )
    assert {name: (series.panel, series.points) for name, series in made.series.items()} == {
        "loss": ("Loss", [(20, 2.0)]),
        "learning rate": ("Learning rate", [(20, 0.1)]),
        "val/loss": ("Loss", [(20, 3.0)]),
        "accuracy": ("Accuracy", [(20, 0.5)]),
        "grad_norm": ("grad_norm", [(20, 9)]),
        "val_accuracy_epoch": ("Accuracy", [(20, 0.25)]),
    }
    assert made.summary(105.0, running=True)["loss"] == 2.0


def test_panels_are_bounded() -> None:
    outputs = {f"score{number}": 1.0 for number in range(MOST_PANELS + 5)}
    made = view(
        {**START, "script": True},
        {"time": 101.0, "kind": "train", "iteration": 20, "outputs": outputs},
    )
    panels = [series.panel for series in made.series.values()]
    assert panels[MOST_PANELS:] == ["Others"] * 5
    assert len(set(panels)) == MOST_PANELS + 1
