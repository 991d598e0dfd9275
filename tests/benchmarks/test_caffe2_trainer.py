"""The benchmarks of the ResNet-50 trainer run, and print what they promise."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import caffe2_shards
from poseidon.caffe2.images.pictures import make_two_class
from tests.support.free_ports import free_ports


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(200)
def test_the_ratio_is_printed(repository: Path) -> None:
    script = str(repository / "benchmarks" / "caffe2_trainer.py")
    command = [sys.executable, script, "--shards=2", "--batch=2", "--side=32", "--turns=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert re.fullmatch(
        r"ResNet-50, 2 shards of 2 images of 32 x 32: torch with DDP [\d.]+ s, poseidon\.caffe2 "
        r"[\d.]+ s, ratio [\d.]+",
        done.stdout.strip(),
    )


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.needs("hosts", "redis")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["folder", "redis"])
def test_three_hosts_of_unequal_speed(tmp_path: Path, store: str) -> None:
    make_two_class(tmp_path / "train", "lmdb", "caffe2", 24, seed=0)
    port = free_ports(1)[0] if store == "redis" else 0
    args = argparse.Namespace(images=24, side=32, redis=port)
    row = caffe2_shards.Row(("fast", "fast", "slow"), 4, weighted=True)
    folder = tmp_path / "row"
    folder.mkdir()
    assert caffe2_shards.seconds(row, {"fast": 0.6, "slow": 0.4}, args, folder) > 0
    consoles = [(folder / f"shard_{shard}" / "console").read_text() for shard in range(3)]
    sizes = {
        re.search(
            r"batch sizes: "
            r"(\[.*\])",
            console,
        )[1]
        for console in consoles
    }  # type: ignore[index]
    assert len(sizes) == 1
