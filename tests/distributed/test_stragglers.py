"""A worker that is slower than the others is named in a real job's log, and once more when it
keeps up.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.training_processes import machinefile, training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200), pytest.mark.thorough]

LAYER = """
import time
from pathlib import Path

import caffe

class Slow(caffe.Layer):
    def setup(self, bottom, top):
        self.rank = caffe.solver_rank()

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        if self.rank == 1 and Path("slow").exists():
            time.sleep(0.5)

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff
"""
NET = """
name: "slow"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } } }
layer { name: "slow" type: "Python" bottom: "data" top: "same" python_param { module: "slow" layer: "Slow" } }
layer { name: "ip" type: "InnerProduct" bottom: "same" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 1000000 display: 10 solver_mode: CPU\n'
NAMED = re.compile(
    r"worker 1 \(client 1, 127\.0\.0\.1\) slows the others down: for (\d+) s it has needed 0\.\d+ s "
    r"an iteration, "
    r"[\d.]+ times as long as the others"
)


def test_a_slow_worker_is_named_until_it_keeps_up(tmp_path: Path) -> None:
    for name, text in (
        ("slow.py", LAYER),
        ("net.prototxt", NET),
        ("solver.prototxt", SOLVER),
        ("slow", ""),
    ):
        (tmp_path / name).write_text(text)
    flags = ("--solver=solver.prototxt", f"--hostfile={machinefile(tmp_path, 2)}", "--output=out")
    with training(tmp_path, *flags) as job:
        named = NAMED.search(job.wait_for("slows the others down"))
        assert named is not None, job.lines[-1]
        assert int(named[1]) >= 30
        (tmp_path / "slow").unlink()
        assert "worker 1 (client 1, 127.0.0.1)" in job.wait_for("is as fast as the others again")
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
