"""Feature extraction as users start it: real processes, databases and scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import decode
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.tools.solo import NetRequest, open_net
from tests.support.databases import make_pictures
from tests.support.training_processes import ROOT, WAIT_S, environment, machinefile, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

COUNT = 41
NET = """
layer { name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "db" backend: LMDB batch_size: 4 shared_file_system: true } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
"""
ENDLESS = (
    'layer { name: "d" type: "DummyData" top: "ip" dummy_data_param { shape { dim: 500 dim: 2 } } }'
)
"""It reports after 1000 records, two batches."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_pictures(tmp_path / "db", COUNT)
    (tmp_path / "net.prototxt").write_text(NET, encoding="utf-8")
    net = open_net(NetRequest(model=tmp_path / "net.prototxt", phase=TEST))
    write_model(tmp_path / "m.caffemodel", net.definition.param, net.layer_blobs())
    net.close()
    return tmp_path


def words(folder: Path, hosts: Path, *more: str) -> list[str]:
    return [
        f"--model={folder}/net.prototxt",
        f"--weights={folder}/m.caffemodel",
        "--extract_feature_blob_names=ip",
        f"--save_feature_leveldb_names={folder}/features",
        f"--hostfile={hosts}",
        f"--output={folder}/out",
        *more,
    ]


@pytest.mark.needs("leveldb")
def test_two_clients_of_two_threads_share_the_records(folder: Path) -> None:
    flags = words(folder, machinefile(folder, 2), "--workers=2")
    done = poseidon_here(folder, "extract_features", *flags)
    assert done.returncode == 0, done.stderr
    assert "2 clients, 4 workers" in done.stderr
    found = []
    for name in ("features_0_0", "features_0_1", "features_1_0", "features_1_1"):
        cursor = open_cursor(folder / name, Backend.LEVELDB)
        found += [decode(value)[1] for _, value in records(cursor)]
        cursor.close()
    assert sorted(found) == list(range(COUNT))
    assert not list(folder.glob(".features*"))


def run_script(folder: Path, name: str, hosts: Path) -> str:
    command = [sys.executable, str(ROOT / "scripts" / name), str(hosts)]
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    return done.stdout


@pytest.mark.needs("leveldb")
def test_a_script_starts_an_extraction_and_one_stops_it_and_nothing_else(folder: Path) -> None:
    (folder / "net.prototxt").write_text(ENDLESS, encoding="utf-8")
    hosts = machinefile(folder, 2)
    command = [
        str(ROOT / "scripts" / "extract_features.sh"),
        *words(folder, hosts, "--num_mini_batches=100000000"),
    ]
    job = subprocess.Popen(
        command, env=environment(folder), stderr=subprocess.PIPE, text=True, cwd=folder
    )
    try:
        assert job.stderr is not None
        assert any("Extracted features" in line for line in job.stderr)
        workers = psutil.Process(job.pid).children(recursive=True)
        assert len(workers) == 3  # with their template
        assert "no job that was started from" in run_script(folder, "kill_caffe.py", hosts)
        assert job.poll() is None
        assert "processes stopped" in run_script(folder, "kill_feature_extractor.py", hosts)
        job.wait(WAIT_S)
        assert not any(worker.is_running() for worker in workers)
        assert not [path.name for path in folder.iterdir() if "features" in path.name]
        again = run_script(folder, "kill_feature_extractor.py", hosts)
        assert again.startswith("no feature extraction that was started from")
    finally:
        for process in (
            [*psutil.Process(job.pid).children(recursive=True)] if job.poll() is None else []
        ):
            process.kill()
        job.kill()
        job.wait()
        assert job.stderr is not None
        job.stderr.close()
