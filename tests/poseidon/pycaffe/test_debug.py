"""debug_info: the lines of a job, also for the copies of Split layers."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import poseidon.pycaffe as caffe
from tests.poseidon.pycaffe.conftest import Write
from tests.support.nets import inputs, layer

FILL = "weight_filler { type: 'xavier' } bias_filler { type: 'uniform' }"
IP = f"inner_product_param {{ num_output: 5 {FILL} }}"
NET = (
    inputs(x=(4, 5), l=(4,))
    + layer(
        "InnerProduct", "x", "h", f"param {{ name: 'w' }} param {{ lr_mult: 0 }} {IP}", name="a"
    )
    + layer("ReLU", "h", "h", name="relu")
    + layer("InnerProduct", "h", "y", IP, name="b")
)
LOSS = layer("SoftmaxWithLoss", "y l", "loss", name="loss")
TWICE = layer("Eltwise", "h y", "z", name="sum") + layer("SoftmaxWithLoss", "z l", "loss")
SOLVER = "net: 'net.prototxt' base_lr: 0.1 lr_policy: 'fixed' display: 2 debug_info: true"


def taken(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [
        record.getMessage() for record in caplog.records if record.name == "poseidon.caffe.net"
    ]
    caplog.clear()
    return lines


def test_the_lines_are_a_jobs(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    net = caffe.Net(str(write("debug_info: true " + NET + LOSS)), caffe.TRAIN)
    x, labels = np.random.default_rng(0).normal(size=(4, 5)), np.arange(4)
    net.forward(x=x, l=labels)
    net.backward()
    lines = taken(caplog)
    job = net._built.compiled
    job({"x": torch.tensor(x, dtype=torch.float32), "l": torch.tensor(labels).float()})
    job.loss.backward()  # type: ignore[no-untyped-call]
    job.log_backward()
    assert lines == taken(caplog)
    assert len(lines) == 15


def test_a_solver_logs_iterations_with_a_display(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    path = write(NET + TWICE)
    monkeypatch.chdir(path.parent)
    solver = caffe.SGDSolver(str(write(SOLVER, "solver.prototxt")))
    counts = []
    for _ in range(3):
        solver.step(1)
        counts.append(sum("h_relu_0_split_1" in line for line in taken(caplog)))
    assert counts == [2, 0, 2]  # as a top, and as a bottom of sum
