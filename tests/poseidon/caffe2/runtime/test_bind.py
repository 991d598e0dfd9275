"""Devices of operators."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime import bind


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_operators_run_on_the_cpu_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bind._has_gpus.cache_clear()
    workspace.ResetWorkspace()
    with caplog.at_level(logging.WARNING), core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 1)):
        net = core.Net("gpu")
        net.ConstantFill([], "x", shape=[2], value=1.5)
        net.Relu("x", "y")
        workspace.RunNetOnce(net)
        workspace.FeedBlob("z", np.ones(2, np.float32))
    assert workspace.FetchBlob("y").tolist() == [1.5, 1.5]
    assert [record.message for record in caplog.records] == [
        "This machine has no GPU: operators of GPUs run on the CPU"
    ]
