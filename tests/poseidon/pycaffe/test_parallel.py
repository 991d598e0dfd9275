"""Several processes, one solver each: together they do what one does with all the records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.errors import JobError, UsageError
from tests.support import pycaffe_child

NET = """
layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: {batch} dim: 5 }} }} }}
layer {{ name: "l" type: "Input" top: "l" input_param {{ shape {{ dim: {batch} }} }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "y"
  inner_product_param {{ num_output: 4 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "loss" }}
"""
SOLVER = 'net: "{net}" base_lr: 0.1 momentum: 0.9 weight_decay: 0.01 lr_policy: "fixed" max_iter: 4 type: "SGD"'


def solver_in(folder: Path, count: int) -> Path:
    """The solver of one of `count` processes."""
    folder.mkdir()
    net, solver = folder / "net.prototxt", folder / "solver.prototxt"
    net.write_text(NET.format(batch=8 // count))
    solver.write_text(SOLVER.format(net=net))
    return solver


def start(folder: Path, repository: Path, rank: int) -> subprocess.Popen[bytes]:
    """One of two processes, which meet in a file."""
    child = [
        sys.executable,
        "-m",
        "tests.support.pycaffe_child",
        str(rank),
        "2",
        f"file://{folder / 'meeting'}",
    ]
    return subprocess.Popen(
        [*child, str(folder / "solver.prototxt"), str(folder / f"{rank}.npz")], cwd=repository
    )


@pytest.mark.processes
def test_two_processes_do_what_one_does(tmp_path: Path, repository: Path) -> None:
    solver_in(tmp_path / "two", 2)
    child = start(tmp_path / "two", repository, 1)
    address = f"file://{tmp_path / 'alone'}"
    alone = pycaffe_child.train(solver_in(tmp_path / "one", 1), rank=0, count=1, address=address)
    address = f"file://{tmp_path / 'two' / 'meeting'}"
    solver = tmp_path / "two" / "solver.prototxt"
    first = pycaffe_child.train(solver, rank=0, count=2, address=address)
    assert child.wait(timeout=50) == 0
    second = list(np.load(tmp_path / "two" / "1.npz").values())
    for mine, theirs, together in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, together, rtol=1e-5, atol=1e-7)


def test_the_error_of_nccl_names_gloo() -> None:
    for call in (lambda: caffe.NCCL(None, "uid"), caffe.NCCL.new_uid):
        with pytest.raises(UsageError, match=r"expected caffe.Gloo, or `poseidon train`"):
            call()


def test_an_unknown_rendezvous_is_an_error(simple: Path, tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text(SOLVER.format(net=simple))
    solver = caffe.get_solver(path)
    with pytest.raises(JobError, match="process 0 of 1 cannot join the others at nowhere://x"):
        caffe.Gloo(solver, "nowhere://x")
