"""Nets of a mobile device."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.predictor import mobile_exporter
from poseidon.caffe2.proto import caffe2_pb2


def test_each_type_of_tensor() -> None:
    strings = np.array([[b"aa"], [b"b"]], dtype=object)
    tensors = [
        np.float32([[1.5, 2]]),
        np.int32([1, -2]),
        np.int64([2**40]),
        np.uint8([[0, 255], [7, 8]]),
        np.zeros((0, 2), np.uint8),
        strings,
    ]
    net = caffe2_pb2.NetDef()
    for index, tensor in enumerate(tensors):
        mobile_exporter.add_tensor(net, f"t{index}", tensor)
    workspace.RunNetOnce(net)
    for index, tensor in enumerate(tensors):
        found = workspace.FetchBlob(f"t{index}")
        assert (found.dtype, found.tolist()) == (tensor.dtype, tensor.tolist())


def test_strings_among_the_parameters() -> None:
    net = core.Net("words")
    net.Copy("words", "out")
    workspace.FeedBlob("words", np.array(["aa", "b"], dtype=object))
    init, predict = mobile_exporter.Export(workspace, net, ["words"])
    assert workspace.Predictor(init, predict).run([])[0].tolist() == [b"aa", b"b"]


def test_truth_values_and_short_numbers() -> None:
    init = caffe2_pb2.NetDef()
    for name, value in (("b", np.array([True, False])), ("i", np.array(7, "int16"))):
        mobile_exporter.add_tensor(init, name, value)
    workspace.RunNetOnce(init)
    assert workspace.FetchBlob("b").tolist() == [True, False]
    assert workspace.FetchBlob("i") == 7 and workspace.FetchBlob("i").dtype == np.int16


def test_a_tensor_that_no_operator_makes() -> None:
    with pytest.raises(ValueError, match="x of type float64 is not exported"):
        mobile_exporter.add_tensor(caffe2_pb2.NetDef(), "x", np.zeros(1))
    with pytest.raises(ValueError, match="tensors of bytes can"):
        mobile_exporter.add_tensor(caffe2_pb2.NetDef(), "x", np.array([1, "a"], dtype=object))


def test_a_net_without_parameters() -> None:
    net = core.Net("copy")
    net.Copy("x", "y")
    init, predict = mobile_exporter.Export(workspace, net, [])
    assert [list(op.output) for op in init.op] == [["x"]]
    assert workspace.Predictor(init, predict).run([np.float32([3])])[0].tolist() == [3]
