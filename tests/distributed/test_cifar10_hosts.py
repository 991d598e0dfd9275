"""cifar10_quick as shipped on real hosts, each with its own part of the data and nothing else in
common.

One command at a desk that has the definitions and no data, and the default exchange (`hybrid`); as
many clients on one machine get the same weights, bit for bit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from poseidon.cli.main import main
from poseidon.exchange.options import ExchangeKind
from tests.support.cifar10 import make_pictures, shipped_solver
from tests.support.ssh_hosts import SshHosts
from tests.support.training import Job, run, weights

ITERATIONS = 4
BATCH = 10

pytestmark = [pytest.mark.needs("hosts"), pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_hosts_have_the_weights_of_as_many_local_clients(
    repository: Path, tmp_path: Path, count: int
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    make_pictures(data, 240)
    assert main(["partition_data", f"--num_partitions={count}", str(data / "train_lmdb")]) == 0
    settings = {"batch": BATCH, "iterations": ITERATIONS}
    here = shipped_solver(
        repository, data / "train_lmdb", tmp_path / "here", **settings, shared=False
    )
    by_factors = run(here, Job(workers=count, shards=count, kind=ExchangeKind.HYBRID)).by_factors
    assert by_factors
    with SshHosts(tmp_path, count + 1) as hosts:
        desk = hosts[count]
        for index, host in enumerate(hosts[:count]):
            there = host.outside("/root/data")
            there.mkdir()
            shutil.copytree(data / f"train_lmdb_{index}", there / f"train_lmdb_{index}")
            shutil.copy(data / "mean.binaryproto", there)
        source = Path("/root/data/train_lmdb")
        shipped_solver(repository, source, desk.outside("/root/job"), **settings, shared=False)
        lines = [f"{index} {host.name} 9000\n" for index, host in enumerate(hosts[:count])]
        desk.outside("/root/hosts").write_text("".join(lines))
        words = ["train", "--solver=job/solver.prototxt", "--hostfile=hosts"]
        words += ["--threads=1", "--output=out"]
        said = desk.run([sys.executable, "-m", "poseidon", *words], timeout_s=250).stderr
        assert "Traceback" not in said
        assert f"{count} clients, {count} workers, {count} shards" in said
        expected = weights(tmp_path / "here", ITERATIONS)
        for place in (hosts[0].outside("/root"), desk.outside("/root/out/snapshots")):
            for there, local in zip(weights(place, ITERATIONS), expected, strict=True):
                assert np.array_equal(there, local)
        logs = sorted(path.name for path in desk.outside("/root/out/from_hosts").iterdir())
        assert logs == [f"worker_{rank}.log" for rank in range(count)]
        for host in hosts:
            assert host.processes() == []
