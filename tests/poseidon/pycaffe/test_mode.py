"""The process-wide settings."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import poseidon.pycaffe as caffe
from poseidon.errors import UsageError
from poseidon.pycaffe import mode
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.nets import inputs, layer


def test_layer_types_are_listed() -> None:
    kinds = caffe.layer_type_list()
    assert kinds == sorted(kinds)
    assert {"Data", "Convolution", "Python", "SoftmaxWithLoss"} <= set(kinds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_is_an_error() -> None:
    caffe.set_mode_cpu()
    for call in (caffe.set_mode_gpu, lambda: caffe.set_device(0)):
        with pytest.raises(UsageError, match="there is no GPU 0: 0 CUDA devices were found"):
            call()
    assert mode.MODE.device.type == "cpu"


def test_seeds_make_nets_alike_and_each_net_its_own(simple: Path) -> None:
    def weights() -> np.ndarray:
        return caffe.Net(str(simple), caffe.TRAIN).params["ip"][0].data.copy()

    caffe.set_random_seed(5)
    first, second = weights(), weights()
    caffe.set_random_seed(5)
    np.testing.assert_array_equal(first, weights())
    np.testing.assert_array_equal(second, weights())
    assert np.abs(first - second).max() > 0


def test_ranks() -> None:
    assert (caffe.solver_count(), caffe.solver_rank(), caffe.has_nccl()) == (1, 0, False)
    caffe.set_solver_count(3)
    caffe.set_solver_rank(2)
    caffe.set_multiprocess(True)
    context = mode.next_context(caffe.TRAIN)
    assert (context.rank, context.workers) == (2, 3)
    caffe.set_solver_rank(3)
    with pytest.raises(UsageError, match="solver rank 3 of 3"):
        mode.next_context(caffe.TRAIN)
    for call in (
        lambda: caffe.set_solver_count(0),
        lambda: caffe.set_solver_rank(-1),
        lambda: caffe.set_virtual_workers(0),
        lambda: caffe.set_virtual_workers(4097),
    ):
        with pytest.raises(UsageError, match="expected"):
            call()


def test_virtual_workers_are_divided_among_the_solvers() -> None:
    caffe.set_solver_count(3)
    caffe.set_solver_rank(1)
    assert mode.placed_virtual_workers() == (VirtualWorkers((0, 1, 2, 3)), 1)
    caffe.set_virtual_workers(7)
    assert mode.placed_virtual_workers() == (VirtualWorkers((0, 3, 5, 7)), 1)
    with mode.acting_as(6, 7):
        assert (caffe.solver_rank(), caffe.solver_count()) == (6, 7)
    assert (caffe.solver_rank(), caffe.solver_count()) == (1, 3)
    caffe.set_virtual_workers(2)
    with pytest.raises(UsageError, match="2 virtual workers for 3 solvers: expected one or more"):
        mode.placed_virtual_workers()


def test_the_log_has_glogs_form(capsys: pytest.CaptureFixture[str]) -> None:
    caffe.init_log(0, True)
    try:
        caffe.log("hello")
        caffe.init_log(2)
        caffe.log("not this")
    finally:
        while mode._LOG:
            mode._LOG.pop().close()
        for name in ("poseidon", "ps_server"):
            logging.getLogger(name).setLevel(logging.NOTSET)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("I") and lines[0].endswith("] hello")
    with pytest.raises(UsageError, match="log level 9"):
        caffe.init_log(9)


FORKING = """
import os, signal, torch
import poseidon.pycaffe as caffe
torch.set_num_threads(2)
net = caffe.Net("net.prototxt", caffe.TEST)
net.forward()
child = os.fork()
if not child:
    signal.alarm(30)
    net.forward()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_process_runs_nets(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(
        inputs(x=(4, 8, 64, 64)) + layer("Pooling", "x", "y", "pooling_param { kernel_size: 5 }")
    )
    subprocess.run([sys.executable, "-c", FORKING], cwd=tmp_path, check=True, timeout=50)
