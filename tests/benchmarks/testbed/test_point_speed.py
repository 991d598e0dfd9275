"""The table of a comparison: plain DDP and the fastest hook are what every row is compared with."""

from __future__ import annotations

from benchmarks.testbed.formulas import LinkBytes
from benchmarks.testbed.measurement import Measured, Split
from benchmarks.testbed.point_speed import HEAD, Comparison, Row, table
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.plan.shapes import LayerShape

COMPARISON = Comparison(
    title="net",
    training=TrainingSettings(
        layers=(LayerShape(name="conv", tensors=((2, 2, 1, 1),), work=1),), batch=1, compute_s=0.5
    ),
    workers=4,
    rate_mbit=100.0,
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


def test_rows_say_what_is_lossy_and_are_compared_with_ddp_and_its_fastest_hook() -> None:
    found = table(
        COMPARISON,
        [
            row("hybrid", PoseidonSettings(), 1.0),
            row("DDP", DdpSettings(), 4.0),
            row("DDP fp16", DdpSettings(hook="fp16"), 2.0),
            row("DDP PowerSGD 1", DdpSettings(hook="powersgd:1"), 0.5),
        ],
    )
    columns = {name: [cells[HEAD.index(name)] for cells in found.rows] for name in HEAD}
    assert columns["lossy"] == ["no", "no", "yes", "yes"]
    assert columns["DDP / this"] == ["4.00", "1.00", "2.00", "8.00"]
    assert columns["hook / this"] == ["0.50", "0.12", "0.25", "1.00"]
    assert [fact["lossy"] for fact in found.facts] == [False, False, True, True]
    assert found.facts[0]["hook_over_this"] == 0.5


def test_without_hooks_there_is_nothing_to_compare_with() -> None:
    found = table(COMPARISON, [row("hybrid", PoseidonSettings(), 1.0), row("DDP", DdpSettings(), 4.0)])
    assert [cells[HEAD.index("hook / this")] for cells in found.rows] == ["-", "-"]
    assert found.facts[0]["hook_over_this"] is None
