"""Several processes and virtual workers: together they do what one solver does with all records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.errors import JobError, UsageError
from poseidon.pycaffe import parallel
from tests.support import pycaffe_child

NET = """
layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: {batch} dim: 5 }} }} }}
layer {{ name: "l" type: "Input" top: "l" input_param {{ shape {{ dim: {batch} }} }} }}
layer {{ name: "ip1" type: "InnerProduct" bottom: "x" top: "h"
  inner_product_param {{ num_output: 6 weight_filler {{ type: "xavier" }} }} }}
{more}
layer {{ name: "ip" type: "InnerProduct" bottom: "h" top: "y"
  inner_product_param {{ num_output: 4 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "loss" }}
"""
MORE = """
layer { name: "norm" type: "BatchNorm" bottom: "h" top: "h" }
layer { name: "drop" type: "Dropout" bottom: "h" top: "h" }
"""
SOLVER = """net: "{net}" base_lr: 0.1 momentum: 0.9 weight_decay: 0.01 lr_policy: "fixed" max_iter: 4 type: "SGD"
iter_size: 2 clip_gradients: 0.3 random_seed: 5 snapshot: 4 snapshot_prefix: "{folder}/snap"
"""


def solver_in(folder: Path, virtual: int, more: str = MORE) -> Path:
    """The solver of one of the processes that compute for virtual workers."""
    folder.mkdir()
    net, solver = folder / "net.prototxt", folder / "solver.prototxt"
    net.write_text(NET.format(batch=pycaffe_child.RECORDS // virtual, more=more))
    solver.write_text(SOLVER.format(net=net, folder=folder))
    return solver


def start(folder: Path, repository: Path, rank: int, virtual: int) -> subprocess.Popen[bytes]:
    """One of two processes, which meet in a file."""
    child = [
        sys.executable,
        "-m",
        "tests.support.pycaffe_child",
        *(str(rank), "2", str(virtual)),
        f"file://{folder / 'meeting'}",
    ]
    return subprocess.Popen(
        [*child, str(folder / "solver.prototxt"), str(folder / f"{rank}.npz")], cwd=repository
    )


def alone(folder: Path, virtual: int, more: str = MORE) -> list[np.ndarray]:
    """The weights of one process that computes for all virtual workers."""
    solver, address = solver_in(folder, virtual, more), f"file://{folder / 'meeting'}"
    return pycaffe_child.train(solver, rank=0, count=1, virtual=virtual, address=address)


@pytest.mark.processes
def test_two_processes_have_the_bits_of_one_with_as_many_virtual_workers(
    tmp_path: Path, repository: Path
) -> None:
    """Each of the two sends two sums. The net has dropout and statistics."""
    expected = alone(tmp_path / "one", 5)
    solver = solver_in(tmp_path / "two", 5)
    child = start(tmp_path / "two", repository, 1, 5)
    address = f"file://{tmp_path / 'two' / 'meeting'}"
    first = pycaffe_child.train(solver, rank=0, count=2, virtual=5, address=address)
    assert child.wait(timeout=50) == 0
    second = list(np.load(tmp_path / "two" / "1.npz").values())
    for mine, theirs, together in zip(first, second, expected, strict=True):
        np.testing.assert_array_equal(mine, together)
        np.testing.assert_array_equal(theirs, together)
    saved = [path.name for path in sorted((tmp_path / "two").glob("snap*"))]
    assert saved == [path.name for path in sorted((tmp_path / "one").glob("snap*"))] != []


def test_virtual_workers_do_what_one_solver_does_with_all_records(tmp_path: Path) -> None:
    several, one = (alone(tmp_path / str(count), count, "") for count in (5, 1))
    for mine, together in zip(several, one, strict=True):
        np.testing.assert_allclose(mine, together, rtol=1e-5, atol=1e-7)


def test_another_process_without_a_group_is_an_error(tmp_path: Path) -> None:
    caffe.set_solver_count(2)
    caffe.set_virtual_workers(5)
    solver = caffe.get_solver(solver_in(tmp_path / "lone", 5))
    assert len(solver.nets) == 3
    with pytest.raises(UsageError, match=r"for 3 of 5 virtual workers; add a caffe\.Gloo"):
        solver.step(1)


def test_the_error_of_nccl_names_gloo() -> None:
    for call in (lambda: caffe.NCCL(None, "uid"), caffe.NCCL.new_uid):
        with pytest.raises(UsageError, match=r"use caffe.Gloo, or `poseidon train`"):
            call()


def test_an_unknown_rendezvous_is_an_error(simple: Path, tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text(SOLVER.format(net=simple, folder=tmp_path))
    solver = caffe.get_solver(path)
    with pytest.raises(JobError, match="process 0 of 1 cannot join the others at nowhere://x"):
        caffe.Gloo(solver, "nowhere://x")


def test_times_are_from_a_start_to_the_next_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "clock_of", lambda _: iter(range(10)).__next__)
    watch = caffe.Timer()
    assert watch.ms == 0
    watch.start()
    watch.start()
    watch.stop()
    watch.stop()
    assert watch.ms == 1000
    watch.start()
    assert (watch.ms, watch.ms) == (1000, 1000)
