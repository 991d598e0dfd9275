"""The table of a comparison: plain DDP and the fastest hook are what every row is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.testbed import point_speed
from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.formulas import LinkBytes
from benchmarks.testbed.measurement import Measured, Split
from benchmarks.testbed.point_speed import HEAD, LOSS, Comparison, How, Row, compare, table
from benchmarks.testbed.tables import Table
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.observe.plan.shapes import LayerShape

COMPARISON = Comparison(
    title="net",
    training=TrainingSettings(
        layers=(LayerShape(name="conv", tensors=((2, 2, 1, 1),), work=1),), batch=1, compute_s=0.5
    ),
    workers=4,
    rates_mbit=(100.0,),
    ours=(PoseidonSettings(),),
)


def row(name: str, how: DdpSettings | PoseidonSettings, seconds: float) -> Row:
    measured = Measured(
        name=name,
        seconds=[seconds],
        sent_bytes=[1e6],
        split=[Split(worker_user_s=1.0, worker_system_s=0.0, shard_user_s=0.0, shard_system_s=0.0)],
    )
    return Row(how=how, measured=measured, formula=LinkBytes(worker=1e6))


def column(found: Table, name: str) -> list[str]:
    return [cells[HEAD.index(name)] for cells in found.rows]


def test_ours_come_first_from_worst_to_best_then_ddp_then_its_hooks() -> None:
    found = table(
        COMPARISON,
        100.0,
        [
            row("hybrid+int8", PoseidonSettings.parse("hybrid+int8"), 1.0),
            row("DDP PowerSGD 1", DdpSettings(hook="powersgd:1"), 0.5),
            row("DDP", DdpSettings(), 4.0),
            row("hybrid", PoseidonSettings(), 2.0),
            row("DDP fp16", DdpSettings(hook="fp16"), 2.5),
        ],
    )
    assert column(found, "job") == ["hybrid", "hybrid+int8", "DDP", "DDP fp16", "DDP PowerSGD 1"]
    assert column(found, "lossy") == ["no", "yes", "no", "yes", "yes"]
    assert column(found, "times DDP") == ["2.00", "4.00", "1.00", "1.60", "8.00"]
    assert column(found, "times hook") == ["0.25", "0.50", "0.12", "0.20", "1.00"]
    assert column(found, "compute") == ["25%", "50%", "12%", "20%", "100%"]
    assert found.facts[1]["hook_over_this"] == 0.5
    assert found.title == "net, 100 Mbit/s"


def test_without_ddp_there_is_nothing_to_compare_with() -> None:
    found = table(COMPARISON, None, [row("hybrid", PoseidonSettings(), 1.0)])
    assert (column(found, "times DDP"), column(found, "times hook")) == (["-"], ["-"])
    assert found.facts[0]["hook_over_this"] is None
    assert found.facts[0]["quartiles_s"] == (1.0, 1.0)


def test_a_computed_net_is_compared_with_one_process_and_has_losses() -> None:
    """The loss is taken from the last iterations that all jobs have made."""
    training = replace(COMPARISON.training, computed="gpt-2m", compute_s=0.0)
    alone = DdpSettings(alone=True)
    rows = [
        row("hybrid", PoseidonSettings(), 1.0),
        row("DDP", DdpSettings(), 2.0),
        row("one process", alone, 0.5),
    ]
    for one, losses in zip(rows, ([3.0, 1.0, 9.0], [4.0, 2.0, 9.0], [5.0, 4.0]), strict=True):
        one.measured.losses = losses
    comparison = replace(COMPARISON, training=training)
    found = table(comparison, 100.0, rows)
    assert comparison.jobs[0] == alone
    assert column(found, "job") == ["one process", "hybrid", "DDP"]
    assert column(found, "compute") == ["100%", "50%", "25%"]
    assert found.head[-1] == LOSS
    assert [cells[-1] for cells in found.rows] == ["4.5000", "2.0000", "3.0000"]
    assert [fact["hook_over_this"] for fact in found.facts] == [None] * 3


def test_a_computed_net_starts_anew_for_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[float | None, ...]] = []
    monkeypatch.setattr(
        point_speed, "_measure_group", lambda *arguments: started.append(arguments[2])
    )
    training = replace(COMPARISON.training, computed="gpt-2m")
    both = replace(COMPARISON, training=training, rates_mbit=(100.0, None))
    assert [one.title for one in compare(both, lambda line: None)] == [
        "net, 100 Mbit/s",
        "net, unshaped",
    ]
    assert started == [(100.0,), (None,)]


def test_jobs_start_in_turn_so_that_those_that_fit_together_are_ours_and_ddps() -> None:
    ours = (PoseidonSettings(), PoseidonSettings.parse("ps+int8"), PoseidonSettings.parse("ps"))
    jobs = replace(COMPARISON, ours=ours, hooks=("fp16",), buckets_mb=(5.0,)).jobs
    ddp = [DdpSettings(), DdpSettings(bucket_mb=5.0), DdpSettings(hook="fp16")]
    assert jobs == [*ddp[:2], ours[0], ddp[2], *ours[1:]]
    assert replace(COMPARISON, with_ddp=False).jobs == [PoseidonSettings()]


def test_after_the_limit_no_group_of_jobs_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that measures its links starts once for each rate; the others once for all.

    With one rate all are one group.
    """
    started: list[tuple[list[How], tuple[float | None, ...]]] = []

    def measure_group(
        comparison: Comparison,
        group: list[How],
        rates: tuple[float | None, ...],
        found: dict[float | None, list[Row]],
        report: object,
    ) -> None:
        started.append((group, rates))

    monkeypatch.setattr(point_speed, "_measure_group", measure_group)
    monkeypatch.setattr(point_speed, "MEASURES_LINKS", ("ps",))
    auto = PoseidonSettings(exchange="ps")
    both = replace(
        COMPARISON, ours=(PoseidonSettings(), auto), rates_mbit=(100.0, None), buckets_mb=()
    )
    tables = compare(both, lambda line: None)
    assert [one.title for one in tables] == ["net, 100 Mbit/s", "net, unshaped"]
    assert started == [
        ([DdpSettings(), PoseidonSettings()], (100.0, None)),
        ([auto], (100.0,)),
        ([auto], (None,)),
    ]
    compare(replace(both, rates_mbit=(100.0,)), lambda line: None)
    assert started.pop() == ([DdpSettings(), PoseidonSettings(), auto], (100.0,))
    said: list[str] = []
    compare(replace(both, limit_s=0.0), said.append)
    assert len(started) == 3
    assert said == ["no time is left for 2 jobs", *["no time is left for 1 jobs"] * 2]


@pytest.mark.parametrize("error", [SystemExit(143), TestbedError("a worker is gone")])
def test_what_was_finished_survives_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    done = row("DDP", DdpSettings(), 4.0)

    def measure_group(*arguments: Any) -> None:
        found = arguments[3]
        if found[100.0]:
            raise error
        found[100.0].append(done)

    said: list[str] = []
    monkeypatch.setattr(point_speed, "_measure_group", measure_group)
    monkeypatch.setattr(
        point_speed,
        "groups_that_fit",
        lambda training, jobs, *rest, **more: [[job] for job in jobs],
    )
    (found,) = compare(replace(COMPARISON, buckets_mb=()), said.append)
    assert column(found, "job") == ["DDP"]
    assert said == [f"stopped, the tables have the jobs that were finished: {error}"]
    monkeypatch.setattr(point_speed, "_measure_group", lambda *arguments: fail(error))
    with pytest.raises(type(error)):
        compare(replace(COMPARISON, buckets_mb=()), said.append)


def fail(error: BaseException) -> None:
    raise error
