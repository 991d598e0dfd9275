"""The formula of hosts with several GPUs, worked out by hand, and the table that it makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from poseidon.observe.plan.gpu_hosts import (
    BUCKET_BYTES,
    GpuHosts,
    GpuModel,
    by_ddp,
    rows,
    through_shards,
)

MODEL = GpuModel(name="m", elements=8.0, compute_s=0.0)
"""32 bytes."""
SLOW = 1e-6
FREE = 1e12
ON = GpuHosts(
    hosts=4, gpus=2, link=FREE, goodput=1.0, pcie=FREE, between=FREE, memory=FREE, process=FREE
)


@pytest.mark.parametrize(
    ("slow", "bound", "float32", "half"),
    [
        ("link", "link", 2 * 32 * 3 / 4, 32 * 3 / 4),
        ("process", "processes", 2 * 16, 16),
        ("pcie", "PCIe", 16, 16),  # in: the values of its part
        ("between", "GPUs", 32, 32),  # 16 of its gradient for the other, 16 of the other's values
        ("memory", "memory", 2 * (16 + 16), 2 * (16 + 8)),
    ],
)
def test_what_is_slow_bounds_a_step(
    slow: str, bound: str, float32: float, half: float, fast: GpuHosts = ON
) -> None:
    on = replace(fast, **{slow: SLOW})  # type: ignore[arg-type]
    for wire, amount in ((1.0, float32), (0.5, half)):
        step = through_shards(MODEL, on, push=wire, value=wire)
        assert step.bound == bound
        assert step.seconds == pytest.approx(amount / SLOW)


@pytest.mark.parametrize(
    ("slow", "bound", "float32", "half"),
    [
        ("pcie", "PCIe", 48, 48),  # in: 16 of the other's gradient, 32 of values; out: 32 + p 16
        ("memory", "memory", 2 * (48 + 48), 2 * (48 + 40)),
    ],
)
def test_without_a_path_between_gpus_all_passes_the_host(
    slow: str, bound: str, float32: float, half: float
) -> None:
    test_what_is_slow_bounds_a_step(slow, bound, float32, half, replace(ON, between=0.0))


def test_a_step_takes_at_least_its_computation() -> None:
    step = through_shards(replace(MODEL, compute_s=5.0), ON, push=1.0, value=1.0)
    assert (step.bound, step.seconds) == ("computation", pytest.approx(5.0))


def test_the_last_bucket_of_ddp_is_not_hidden() -> None:
    model = GpuModel(name="m", elements=BUCKET_BYTES, compute_s=3.0)  # four buckets
    on = replace(ON, link=7 / 4 * model.size)  # 8 GPUs: a second for the whole
    step = by_ddp(model, on, sent=1.0, most=FREE)
    backward = (2.0**4 + 0.75**4) ** 0.25
    assert step.seconds == pytest.approx(1.0 + backward + 0.25)
    assert step.bound == "computation"
    slower = by_ddp(model, on, sent=1.0, most=on.link / 8)
    assert slower.bound == "NCCL on the link"
    assert slower.seconds > 8


def test_the_table_of_the_documentation_is_the_formula_s() -> None:
    page = Path("benchmarks/results/costs.md").read_text(encoding="utf-8")
    assert "\n".join(rows()) in page
