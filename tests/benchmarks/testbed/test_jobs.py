"""True jobs on two true hosts: both systems run rounds by turns, and move what the formulas say."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from benchmarks.testbed.computed import TOKENS
from benchmarks.testbed.formulas import expected
from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.measurement import Effort, measure
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.observe.plan.shapes import LayerShape

TRAINING = TrainingSettings(
    layers=(
        LayerShape(name="conv", tensors=((300, 300, 3, 3), (300,)), work=1),
        LayerShape(name="fc", tensors=((1000, 800), (1000,)), work=1, fully_connected=True),
    ),
    batch=4,
    compute_s=0.0,
)


@pytest.mark.thorough
@pytest.mark.needs("networks")
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_ours_and_ddp_take_turns_and_keep_to_the_formulas() -> None:
    ours, ddp = PoseidonSettings(), DdpSettings()
    with Hosts(2) as hosts:
        jobs = [HostJob(hosts, TRAINING, how) for how in (ours, ddp)]
        with jobs[0], jobs[1]:
            found = measure(hosts, jobs, Effort(rounds=2, iterations=2, warm=1))
    assert [measured.name for measured in found] == ["hybrid", "DDP"]
    for measured, how in zip(found, (ours, ddp), strict=True):
        formula = expected(TRAINING, how, 2).worker
        assert measured.sent_bytes == pytest.approx([formula] * 2, rel=0.03)
        assert measured.received_bytes == pytest.approx([formula] * 2, rel=0.03)
    assert len(jobs[0].shard_bytes) == 2
    assert jobs[1].shard_bytes == []


@pytest.mark.thorough
@pytest.mark.needs("networks")
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_computed_net_has_the_losses_of_ddp_and_local_steps_those_of_diloco() -> None:
    """Ours are encrypted."""
    training = TrainingSettings(layers=(), batch=TOKENS, compute_s=0.0, computed="gpt-2m")
    hows: list[PoseidonSettings | DdpSettings] = [
        PoseidonSettings.parse("default"),
        PoseidonSettings.parse("default+H2"),
        DdpSettings(),
        DdpSettings(hook="diloco:2"),
        DdpSettings(alone=True),
    ]
    with Hosts(2) as hosts, ExitStack() as stack:
        jobs = [stack.enter_context(HostJob(hosts, training, how)) for how in hows]
        measure(hosts, jobs, Effort(rounds=1, iterations=4, warm=0))
    ours, steps, ddp, diloco, alone = (job.losses[:5] for job in jobs)
    assert ours == pytest.approx(ddp, rel=1e-4)
    assert steps == pytest.approx(diloco, rel=1e-4)
    assert ours[-1] != pytest.approx(steps[-1], rel=1e-4)
    assert len(alone) == 5
