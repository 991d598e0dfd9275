"""The table of a comparison: plain DDP and the fastest hook are what every row is compared with."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.testbed.formulas import LinkBytes
from benchmarks.testbed.measurement import Measured, Split
from benchmarks.testbed.point_speed import HEAD, Comparison, Row, table
from benchmarks.testbed.tables import Table
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.plan.shapes import LayerShape

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


def test_a_comparison_has_our_jobs_and_those_of_ddp() -> None:
    jobs = replace(COMPARISON, hooks=("fp16",), buckets_mb=(5.0,)).jobs
    assert jobs == [PoseidonSettings(), DdpSettings(), DdpSettings(bucket_mb=5.0), DdpSettings(hook="fp16")]
    assert replace(COMPARISON, with_ddp=False).jobs == [PoseidonSettings()]
