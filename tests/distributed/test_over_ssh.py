"""Jobs started over SSH on this host, in an empty folder: definitions are copied, and nothing is
left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from poseidon.base.settings import inherited_environment
from tests.support.live_processes import none_left
from tests.support.loopback_sshd import LoopbackSshd
from tests.support.shadowing_files import write_shadowing_files

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.processes, pytest.mark.timeout(120)]
NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 weight_filler { type: "gaussian" std: 1 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: {iterations} display: 1 snapshot: 4 snapshot_prefix: "snap" solver_mode: CPU random_seed: 3\n'


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSshd]:
    server = LoopbackSshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


def _desk(
    folder: Path, sshd: LoopbackSshd, *, iterations: int, clients: int
) -> tuple[list[str], dict[str, str]]:
    """A folder with definitions and a machinefile whose clients work elsewhere; the command and
    its environment.
    """
    (folder / "far").mkdir(parents=True)
    write_shadowing_files(folder, packages=False)
    write_shadowing_files(folder / "far", packages=True)
    (folder / "net.prototxt").write_text(NET)
    (folder / "solver.prototxt").write_text(SOLVER.format(iterations=iterations))
    (folder / "hosts").write_text(
        "".join(f"{k} 127.0.0.1 0 workdir={folder}/far\n" for k in range(clients))
    )
    words = [
        sys.executable,
        "-m",
        "poseidon",
        "train",
        "--solver=solver.prototxt",
        "--hostfile=hosts",
        "--threads=1",
    ]
    far = ["--launcher=ssh", f"--ssh_config={sshd.config}", "--output=out"]
    return [*words, *far], {**inherited_environment(), "POSEIDON_HOME": str(folder / "state")}


def test_a_folder_that_has_nothing_of_the_job_gets_its_snapshots_and_logs(
    sshd: LoopbackSshd, tmp_path: Path
) -> None:
    words, environment = _desk(tmp_path, sshd, iterations=999, clients=1)
    (tmp_path / "net.prototxt").rename(tmp_path / "other.prototxt")
    words += ["--workers=2", "--max_iter=8", "--set", "net=other.prototxt"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=100)
    assert (tmp_path / "far" / "snap_iter_8.caffemodel").is_file()
    assert not (tmp_path / "snap_iter_8.caffemodel").exists()
    assert sorted(path.name for path in (tmp_path / "far" / "out").glob("worker_*.log")) == [
        "worker_0.log",
        "worker_1.log",
    ]
    assert (
        sorted(path.name for path in (tmp_path / "far").iterdir() if "prototxt" in path.name) == []
    )


@pytest.mark.thorough
def test_nothing_outlives_a_launcher_that_was_killed(sshd: LoopbackSshd, tmp_path: Path) -> None:
    words, environment = _desk(tmp_path, sshd, iterations=10**9, clients=2)
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stderr is not None
        job = launcher.stderr.readline().split()[1].rstrip(":")
        for line in launcher.stderr:
            if "Iteration 3," in line:
                break
        pids = [
            process.pid for process in psutil.process_iter() if job in " ".join(_words(process))
        ]
        launcher.send_signal(signal.SIGKILL)
        launcher.stderr.close()
    assert len(pids) >= 5  # an agent, two shards and two workers
    assert none_left(pids, timeout_s=60.0)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
