"""cifar10_quick as shipped on four real hosts, each with its own part of the data and nothing else in common.

One command at a desk that has the definitions and no data, and the default exchange (`hybrid`); the weights are those of four clients on one machine, bit for bit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from poseidon.cli.main import main
from poseidon.exchange.cost import ExchangeKind
from tests.support.cifar10 import make_pictures, shipped_solver
from tests.support.ssh_hosts import SshHosts
from tests.support.training import Job, run, weights

HOSTS = 4
ITERATIONS = 4
BATCH = 10

pytestmark = [pytest.mark.needs("hosts"), pytest.mark.processes, pytest.mark.timeout(300)]


def test_four_hosts_have_the_weights_of_four_local_clients(repository: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    make_pictures(data, 240)
    assert main(["partition_data", f"--num_partitions={HOSTS}", str(data / "train_lmdb")]) == 0
    settings = {"batch": BATCH, "iterations": ITERATIONS}
    here = shipped_solver(repository, data / "train_lmdb", tmp_path / "here", **settings, shared=False)
    by_factors = run(here, Job(workers=HOSTS, shards=HOSTS, kind=ExchangeKind.HYBRID)).by_factors
    assert by_factors
    with SshHosts(tmp_path, HOSTS + 1) as hosts:
        desk = hosts[HOSTS]
        for index, host in enumerate(hosts[:HOSTS]):
            there = host.outside("/root/data")
            there.mkdir()
            shutil.copytree(data / f"train_lmdb_{index}", there / f"train_lmdb_{index}")
            shutil.copy(data / "mean.binaryproto", there)
        source = Path("/root/data/train_lmdb")
        shipped_solver(repository, source, desk.outside("/root/job"), **settings, shared=False)
        lines = [f"{index} {host.name} 9000\n" for index, host in enumerate(hosts[:HOSTS])]
        desk.outside("/root/hosts").write_text("".join(lines))
        words = ["train", "--solver=job/solver.prototxt", "--hostfile=hosts"]
        words += ["--threads=1", "--output=out"]
        said = desk.run([sys.executable, "-m", "poseidon", *words], timeout_s=250).stderr
        assert "Traceback" not in said
        assert "4 clients, 4 workers, 4 shards" in said
        expected = weights(tmp_path / "here", ITERATIONS)
        for place in (hosts[0].outside("/root"), desk.outside("/root/out/snapshots")):
            for there, local in zip(weights(place, ITERATIONS), expected, strict=True):
                assert np.array_equal(there, local)
        logs = sorted(path.name for path in desk.outside("/root/out/from_hosts").iterdir())
        assert logs == [f"worker_{rank}.log" for rank in range(4)]
        for host in hosts:
            assert host.processes() == []
