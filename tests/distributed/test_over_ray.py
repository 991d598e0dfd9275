"""Jobs on the nodes of a Ray cluster: the same bits as on this machine, also after the loss of a
node, from memory and from disk; Ray Train over Poseidon's connections.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from poseidon.cluster.python_command import module_arguments
from poseidon.exchange.options import ExchangeKind
from tests.support.live_processes import none_left
from tests.support.ray_cluster import RayCluster
from tests.support.shadowing_files import write_shadowing_files
from tests.support.training import Job, run, weights

pytestmark = [pytest.mark.needs("ray"), pytest.mark.processes, pytest.mark.timeout(600)]

NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" } } }
layer { name: "gate" type: "Gate" bottom: "data" top: "gated" python_param { param_str: "GATE 25" } }
layer { name: "ip" type: "InnerProduct" bottom: "gated" top: "ip" inner_product_param { num_output: 2 weight_filler { type: "gaussian" std: 1 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = (
    'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 max_iter: 30 display: 5 '
    "snapshot: 10 "
    'snapshot_prefix: "snap" solver_mode: CPU random_seed: 3\n'
)
TRAIN = [
    *(sys.executable, "-m", "poseidon", "train", "--solver=solver.prototxt"),
    *("--import=tests.support.gate_layer", "--threads=1", "--output=out"),
]
LIMIT_S = 400.0
FROM_DISK = "--elastic=0"
EPOCHS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head, which runs launchers and no client, and two nodes."""
    cluster = RayCluster()
    try:
        cluster.add(num_cpus=0)
        cluster.add(num_cpus=2)
        cluster.add(num_cpus=2)
        yield cluster
    finally:
        cluster.close()


def _definitions(folder: Path) -> Path:
    """Write a solver and its net; return the file that lets its training pass iteration 25, the
    same for all of a test.
    """
    folder.mkdir()
    gate = folder.with_name("gate")
    (folder / "net.prototxt").write_text(NET.replace("GATE", str(gate)))
    (folder / "solver.prototxt").write_text(SOLVER)
    return gate


def _start(cluster: RayCluster, folder: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAIN, *flags],
        cwd=folder,
        env=cluster.environment({"POSEIDON_HOME": str(folder / "state")}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _train_here(folder: Path) -> Path:
    """Train without an interruption and without a gate, which changes no bit, in threads; return
    the folder.
    """
    _definitions(folder)
    ungated = re.sub(r"layer .*\"Gate\".*\n", "", NET).replace('bottom: "gated"', 'bottom: "data"')
    (folder / "net.prototxt").write_text(ungated)
    run(folder / "solver.prototxt", Job(workers=2, shards=2, kind=ExchangeKind.HYBRID))
    return folder


def _same_weights(one: Path, other: Path) -> bool:
    pairs = zip(weights(one, 30), weights(other, 30), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def _train_through_a_loss(
    cluster: RayCluster, folder: Path, flags: Sequence[str], lose: Callable[[], None]
) -> str:
    """Train, and lose a node at iteration 25; return the log.

    The workers wait at iteration 25 until the node is lost; without memory snapshots until the job
    is started again.
    """
    gate = _definitions(folder)
    lines: list[str] = []
    killed = False
    with _start(cluster, folder, flags) as launcher:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            lines.append(line)
            if "; restart 1 of 3: " in line:
                gate.touch()
            if "Iteration 20, lr" in line and not killed:
                killed = True
                lose()
                if FROM_DISK not in flags:
                    gate.touch()
    log = "".join(lines)
    assert launcher.returncode == 0, log
    return log


def _replace(cluster: RayCluster, number: int) -> None:
    """Kill a node and add another one."""
    cluster.kill(number)
    cluster.add(num_cpus=2)


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


@pytest.mark.thorough
@pytest.mark.needs("ray train")
@pytest.mark.parametrize("lost", [False, True])
def test_ray_train_has_the_losses_of_one_process_also_after_the_loss_of_a_worker(
    cluster: RayCluster, repository: Path, tmp_path: Path, lost: bool
) -> None:
    example = repository / "examples" / "ray_train" / "train.py"
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
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^epoch (\d): loss (\S+), over poseidon$", done.stdout, re.MULTILINE)
    assert [int(epoch) for epoch, _ in lines] == [*range(1, EPOCHS + 1)]
    expected = losses_of_one_process(example)
    assert [float(loss) for _, loss in lines] == pytest.approx(expected, abs=1e-6)


def test_a_node_is_lost_and_the_job_ends_with_the_same_bits(
    cluster: RayCluster, tmp_path: Path
) -> None:
    ray = [f"--launcher=ray:address={cluster.address}", "--launcher=ray:clients=2"]
    log = _train_through_a_loss(cluster, tmp_path / "ray", ray, lambda: _replace(cluster, 2))
    assert re.search(r"continuing from iteration \d+ in memory, without client [01] \(", log)
    assert "finished at iteration 30 after 1 start from memory" in log.splitlines()[-1]
    assert _same_weights(tmp_path / "ray", _train_here(tmp_path / "local"))
    job = log.split()[1].rstrip(":")
    assert none_left([process.pid for process in cluster.processes_of(job)], 30.0)


@pytest.mark.thorough
@pytest.mark.parametrize("autoscales", [False, True], ids=["added by hand", "by the autoscaler"])
def test_a_node_that_is_added_takes_the_place_of_a_lost_one(
    tmp_path: Path, autoscales: bool
) -> None:
    _definitions(tmp_path / "job").touch()
    endless = SOLVER.replace("max_iter: 30", "max_iter: 10000000").replace("splay: 5", "splay: 100")
    (tmp_path / "job" / "solver.prototxt").write_text(endless.replace("shot: 10", "shot: 100000"))
    cluster = RayCluster()
    lines: list[str] = []
    try:
        for cpus in (0,) if autoscales else (0, 2, 2):
            cluster.add(num_cpus=cpus)
        if autoscales:  # its provider counts a node that was killed
            cluster.autoscale(max_workers=3)
        ray = [f"--launcher=ray:address={cluster.address}", "--launcher=ray:clients=2"]
        with _start(cluster, tmp_path / "job", ray) as launcher:
            assert launcher.stderr is not None
            killed = False
            for line in launcher.stderr:
                lines.append(line)
                if "Iteration 100, lr" in line and not killed:
                    killed = True
                    if autoscales:
                        cluster.autoscaled().pop().kill()
                    else:
                        cluster.kill(2)
                if "in memory, without client" in line and not autoscales:
                    cluster.add(num_cpus=2)
                if line.startswith("continuing from iteration ") and "2 clients" in line:
                    launcher.terminate()
    finally:
        cluster.close()
    assert launcher.returncode == 143, "".join(lines)
    assert any(re.search(r"\d, with client [01] \(\S+\): 2 clients", line) for line in lines)
    assert "after 1 start from memory" in lines[-1]


@pytest.mark.thorough
def test_a_script_runs_on_every_node(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "script.py").write_text("print('a worker runs here')\n")
    write_shadowing_files(tmp_path, packages=True)
    flags = [
        f"--launcher=ray:address={cluster.address}",
        "--launcher=ray:clients=2",
        "--progress=logs=all",
    ]
    flags += ["--threads=1", "--output=out"]
    done = subprocess.run(
        [sys.executable, *module_arguments("poseidon", "run", *flags, "src/script.py")],
        cwd=tmp_path,
        env=cluster.environment({"POSEIDON_HOME": str(tmp_path / "state")}),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "a worker runs here" in done.stdout.splitlines()
    assert "client 1, worker 1: a worker runs here" in done.stderr
