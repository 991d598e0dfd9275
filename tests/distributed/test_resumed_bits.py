"""A job resumed from a snapshot ends with the bits of one that was never interrupted, also on
fewer hosts; each run has new processes.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.support.training_processes import machinefile, make_data, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS, HALF = 8, 4
NET = """
name: "wide"
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { scale: 0.01 mean_value: 128 mirror: true crop_size: 6 }
  data_param { source: "train_lmdb" backend: LMDB batch_size: 7 shared_file_system: true } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 16 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 128
  weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "fc" top: "fc" }
layer { name: "small" type: "InnerProduct" bottom: "fc" top: "small" inner_product_param { num_output: 10
  weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "small" bottom: "label" top: "loss" }
"""
SOLVER = f"""
net: "net.prototxt" base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.004 display: 4 random_seed: 3
max_iter: {STEPS} snapshot: {HALF} snapshot_prefix: "snap"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and definitions."""
    folder = tmp_path_factory.mktemp("resumed")
    make_data(folder)
    (folder / "net.prototxt").write_text(NET, encoding="utf-8")
    (folder / "solver.prototxt").write_text(SOLVER, encoding="utf-8")
    return folder


def cases() -> list[object]:
    """All combinations; two of an odd number of workers are in each run. Lossy codecs
    (`test_virtual_workers.py`) and local steps (`tests/poseidon/caffe/solver/test_checkpoint.py`)
    are in each run with workers in one process.
    """
    sample = {(3, "hybrid", ""), (3, "allreduce", "--threads=2")}
    combined = [
        (2, "ps", "--compress=conv*=topk:0.1,*=int8"),
        (2, "hybrid", "--compress=sign"),
        (2, "ps", "--local_steps=4"),
        (3, "ps", "--local_steps=4"),
        (3, "allreduce", "--local_steps=4"),
        (3, "ps", "--local_steps=4,fragments=2"),
        *itertools.product(
            (1, 2, 3, 4, 5),
            ("ps", "svb", "hybrid", "allreduce"),
            ("", "--threads=1", "--threads=2"),
        ),
    ]
    return [
        pytest.param(*case, marks=() if case in sample else pytest.mark.thorough)
        for case in combined
    ]


@pytest.mark.parametrize(("workers", "exchange", "more_words"), cases())
def test_resumed_is_uninterrupted(
    folder: Path, workers: int, exchange: str, more_words: str
) -> None:
    hosts = machinefile(folder, workers, 1)
    words = [
        "train",
        "--solver=solver.prototxt",
        f"--hostfile={hosts}",
        f"--exchange={exchange}",
        "--output=out",
    ]
    words += more_words.split()
    ended = []
    resume = f"--snapshot=snap_iter_{HALF}.solverstate"
    fewer = [resume, f"--hostfile={machinefile(folder, 2, 1)}"]
    runs = [[], [resume]]
    if workers == 3 and "--local_steps" not in more_words:
        runs = [[], fewer] if exchange == "hybrid" else [[], [resume], fewer]
    for more in runs:
        done = poseidon_here(folder, *words, *more)
        assert done.returncode == 0, done.stderr
        files = [folder / f"snap_iter_{STEPS}.{kind}" for kind in ("caffemodel", "solverstate")]
        ended.append([file.read_bytes() for file in files])
        for file in files:
            file.unlink()
    assert all(files == ended[0] for files in ended)


def test_a_run_that_computes_otherwise_says_so(folder: Path) -> None:
    words = ("train", "--solver=solver.prototxt", "--output=out")
    for threads, warned in ((1, False), (2, True)):
        more = [f"--snapshot=snap_iter_{HALF}.solverstate"] if warned else []
        done = poseidon_here(folder, *words, f"--threads={threads}", *more)
        assert done.returncode == 0, done.stderr
        sentence = f"worker 0 computed with 1 thread on .* when snap_iter_{HALF}.solverstate was written, and now with 2"
        assert bool(re.search(sentence, done.stderr)) == warned, done.stderr
