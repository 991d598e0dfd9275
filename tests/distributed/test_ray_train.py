"""Ray Train over Poseidon's connections, on a real cluster of Ray on this machine."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.needs("ray train"), pytest.mark.processes, pytest.mark.timeout(400)]
LIMIT_S = 300.0
EPOCHS = 4


def losses_of_one_process(example: Path) -> list[float]:
    """Return the mean loss of each epoch, with the batches of both workers in turn."""
    data = runpy.run_path(str(example))["points"](480, seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    samplers = [DistributedSampler(data, 2, rank) for rank in range(2)]
    found = []
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(data, 16, sampler=sampler) for sampler in samplers]
        steps = []
        for batches in zip(*loaders, strict=True):
            loss = sum(nn.functional.cross_entropy(net(x), y) for x, y in batches) / 2
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            steps.append(loss.item())
        found.append(sum(steps) / len(steps))
    return found


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_ray_train_has_the_losses_of_one_process_also_after_the_loss_of_a_worker(
    repository: Path, tmp_path: Path, lost: bool
) -> None:
    example = repository / "examples" / "ray_train" / "train.py"
    cluster = RayCluster()
    try:
        cluster.add(num_cpus=2)
        flags = [f"--address={cluster.address}", f"--epochs={EPOCHS}", "--encrypt"]
        flags += ["--lose_at=2"] if lost else []
        done = subprocess.run(
            [sys.executable, example, *flags, f"--folder={tmp_path / 'out'}"],
            cwd=tmp_path,
            env=cluster.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        cluster.close()
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^epoch (\d): loss (\S+), over poseidon$", done.stdout, re.MULTILINE)
    assert [int(epoch) for epoch, _ in lines] == [*range(1, EPOCHS + 1)]
    expected = losses_of_one_process(example)
    assert [float(loss) for _, loss in lines] == pytest.approx(expected, abs=1e-6)


UNEQUAL = """
import sys
import ray, ray.train, torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from poseidon.ray_train import PoseidonConfig

def train():
    model = prepare_model(torch.nn.Linear(2, 1))
    rate = 0.1 * (1 + ray.train.get_context().get_world_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(9):
        model(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()

ray.init(address=sys.argv[1])
config = PoseidonConfig(check_replicas=int(sys.argv[2]))
TorchTrainer(train, torch_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()
"""


@pytest.mark.thorough
def test_unequal_replicas_end_a_run_of_ray_train(repository: Path, tmp_path: Path) -> None:
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL, encoding="utf-8")
    cluster = RayCluster()
    try:
        cluster.add(num_cpus=2)
        said = []
        for every in ("1000", "0"):
            done = subprocess.run(
                [sys.executable, script, cluster.address, every],
                cwd=tmp_path,
                env={**cluster.environment(), "PYTHONPATH": str(repository)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            said.append((done.returncode != 0, done.stderr))
    finally:
        cluster.close()
    assert [failed for failed, _ in said] == [True, False], said
    assert "the replicas differ: 'weight', 'bias' on worker 1 are not as on worker 0" in said[0][1]
