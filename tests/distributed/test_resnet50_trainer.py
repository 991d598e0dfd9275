"""The ResNet-50 trainer on several shards: started by hand with a folder or Redis, and by the
launcher.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe2.experiment_util import read_log
from poseidon.caffe2.images.pictures import make_two_class
from poseidon.caffe2.runtime.databases import records
from tests.support.redis_server import redis_server
from tests.support.training_processes import ROOT, environment, machinefile, poseidon

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

SCRIPT = ROOT / "examples" / "resnet50" / "resnet50_trainer.py"
WAIT_S = 150
SMALL = [
    "--num_labels=2",
    "--batch_size=4",
    "--epoch_size=16",
    "--num_epochs=1",
    "--image_size=32",
    "--image_scale=36",
    "--num_layers=18",
    "--base_learning_rate=0.004",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_two_class(tmp_path / "train", "lmdb", "caffe2", 16, seed=0)
    return tmp_path


def flags(folder: Path, *more: str) -> list[str]:
    return [*SMALL, f"--train_data={folder / 'train'}", f"--file_store_path={folder}", *more]


def by_hand(
    folder: Path, starts: Sequence[Sequence[str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Start the trainer once for each set of flags, each in a folder of its own; wait for all."""
    started = []
    for number, more in enumerate(starts):
        place = folder / f"shard_{number}"
        place.mkdir()
        command = [sys.executable, str(SCRIPT), *flags(folder, *more)]
        started.append(
            subprocess.Popen(
                command,
                cwd=place,
                env={**environment(folder), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ends = [process.communicate(timeout=WAIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *end)
        for process, end in zip(started, ends, strict=True)
    ]


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


def check_trained(folder: Path, places: Sequence[Path]) -> None:
    """Check that all shards have a row of the same learning rate, and that there is one
    checkpoint.
    """
    rows = [read_log(path)[-1] for place in places for path in place.glob("*.log")]
    assert len(rows) == len(places)
    assert {(row["epoch"], row["learning_rate"]) for row in rows} == {("0", "0.004000000189989805")}
    (path,) = folder.glob("*.mdl")
    names = {key.decode().partition("#")[0] for key, _ in records(str(path), "minidb")}
    assert {"gpu_0/conv1_w", "gpu_0/conv1_w_momentum", "optimizer_iteration"} <= names


@pytest.mark.thorough
@pytest.mark.parametrize("store", ["folder", "redis"])
def test_two_shards_by_hand(folder: Path, store: str) -> None:
    shards = [["--num_shards=2", f"--shard_id={shard}", "--run_id=1"] for shard in range(2)]
    if store == "folder":
        done = by_hand(folder, shards)
    else:
        with redis_server(folder) as server:
            where = ["--redis_host=127.0.0.1", f"--redis_port={server.port}"]
            done = by_hand(folder, [[*shard, *where] for shard in shards])
    assert [end.returncode for end in done] == [0, 0], done
    check_trained(folder, [folder / "shard_0", folder / "shard_1"])


@pytest.mark.thorough
def test_unequal_shards_and_a_restart(folder: Path) -> None:
    sizes = ["--num_shards=2", "--shard_batch_sizes=6,2"]
    done = by_hand(folder, [[*sizes, f"--shard_id={shard}", "--run_id=1"] for shard in range(2)])
    assert [end.returncode for end in done] == [0, 0], done
    inputs = [
        read_log(next((folder / f"shard_{n}").glob("*.log")))[0]["input_count"] for n in range(2)
    ]
    assert inputs == ["12", "4"]
    for shard in range(2):
        (folder / f"shard_{shard}").rename(folder / f"before_{shard}")
    more = [
        *sizes,
        "--num_epochs=2",
        f"--load_model_path={folder / 'resnet50_model_1.mdl'}",
        "--run_id=2",
    ]
    done = by_hand(folder, [[*more, f"--shard_id={shard}"] for shard in range(2)])
    assert [end.returncode for end in done] == [0, 0], done
    assert all("Starting epoch 1/2" in end.stderr for end in done)
    (folder / "shard_0").rename(folder / "after_0")
    again = by_hand(folder, [[*more, "--shard_id=0"]])
    assert again[0].returncode == 1
    assert "run id '2' was used before" in last_line(again[0])


@pytest.mark.thorough
def test_one_command_for_all_workers(folder: Path) -> None:
    hosts = machinefile(folder, 2)
    done = poseidon(
        folder, "run", f"--hostfile={hosts}", SCRIPT, *flags(folder, "--shard_batch_sizes=auto")
    )
    assert done.returncode == 0, done.stderr
    assert "batch sizes: [" in done.stderr
    logs = sorted(folder.glob("resnet18_*.log"))
    assert len(logs) == 2
    losses = [float(read_log(path)[-1]["loss"]) for path in logs]
    assert np.all(np.isfinite(losses))
    assert len(list(folder.glob("*.mdl"))) == 1


@pytest.mark.thorough
def test_a_mistake_in_a_job_is_one_sentence(folder: Path) -> None:
    hosts = machinefile(folder, 2)
    done = poseidon(folder, "run", f"--hostfile={hosts}", SCRIPT, *flags(folder, "--epoch_size=1"))
    assert done.returncode != 0
    assert "--epoch_size=1 is less than one batch of all shards, 8 images" in last_line(done)


def test_a_redis_server_that_is_not_there_is_one_sentence(folder: Path) -> None:
    shard = [
        "--num_shards=2",
        "--shard_id=0",
        "--run_id=1",
        "--redis_host=127.0.0.1",
        "--redis_port=1",
    ]
    (done,) = by_hand(folder, [shard])
    assert done.returncode == 1
    assert last_line(done).startswith("resnet50_trainer.py: ")
    assert "127.0.0.1:1" in last_line(done)
