"""Devices of operators."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime import bind
from poseidon.caffe2.runtime.values import Blob


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_operators_run_on_the_cpu_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bind._gpu_count.cache_clear()
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


def test_a_gpu_that_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "_gpu_count", lambda: 2)
    assert bind.device_of(core.DeviceOption(caffe2_pb2.CUDA, 1)) == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="GPU 2 is not on this machine, whose GPUs are 0 to 1"):
        bind.device_of(core.DeviceOption(caffe2_pb2.CUDA, 2))


def test_a_tensor_is_owned_where_nothing_else_refers_to_its_memory() -> None:
    blob = Blob(torch.ones(4))
    assert bind.is_owned(blob)
    for other in (
        lambda value: value,
        lambda value: value[:1],
        lambda value: value.numpy(),
        lambda value: value.detach().numpy(),
        lambda value: value.view(2, 2).t(),
        lambda value: [{"kept": value}],
    ):
        kept = other(blob.value)
        assert not bind.is_owned(blob)
        del kept
        assert bind.is_owned(blob)
    assert not bind.is_owned(Blob(torch.ones(2, 3).t()))
    assert not bind.is_owned(Blob(torch.ones(1).expand(4)))
    assert not bind.is_owned(Blob(None))
    assert not bind.is_owned(Blob(np.ones(2)))
