"""Estimates of memory, and operators that free blobs."""

from __future__ import annotations

import numpy as np

from poseidon.caffe2 import core, memonger, workspace
from poseidon.caffe2.proto import caffe2_pb2


def test_a_free_follows_the_last_reader() -> None:
    net = core.Net("n")
    for read, made in (("data", "x"), ("x", "y"), ("x", "z"), ("y", "u")):
        net.Copy(read, made)
    net.Alias("u", "u_alias")
    net.AddExternalOutput(net.Add(["z", "u_alias"], "out"))
    freed = memonger.release_blobs_when_used(net.Proto(), {"data"})
    operators = [(op.type, op.output[0]) for op in freed.op]
    assert [name for kind, name in operators if kind == "Free"] == ["x", "y", "z"]
    assert operators.index(("Free", "x")) == operators.index(("Copy", "z")) + 1
    assert not any(op.type == "Free" for op in net.Proto().op)
    some = memonger.release_blobs_when_used(net.Proto(), {"x"}, lambda name: name != "z")
    assert [op.output[0] for op in some.op if op.type == "Free"] == ["y"]
    workspace.ResetWorkspace()
    workspace.FeedBlob("data", np.float32([1, 2]))
    workspace.RunNetOnce(freed)
    assert workspace.FetchBlob("out").tolist() == [2, 4]
    assert memonger.blob_nbytes("out") == 8 and memonger.blob_nbytes("x") == 0


def test_an_estimate() -> None:
    init, net = core.Net("init"), core.Net("n")
    init.ConstantFill([], "w", shape=[10])
    net.Copy("w", "a")
    net.Copy("a", "b")
    net.Free("a", "a")
    net.Copy("b", "b")
    net.Cast("b", "c", to=core.DataType.DOUBLE)
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 0)):  # type: ignore[attr-defined]
        net.Copy("c", "elsewhere")
    shapes = {"w": [10], "a": [10], "b": [10], "c": [5, 2]}
    types = {"w": 1, "a": 1, "b": 1, "c": 13}
    total, most, by_type = memonger.estimate_memory_usage(
        [init.Proto(), net.Proto()], shapes, types, core.DeviceOption(0)
    )
    assert (total, most) == (40 + 40 + 40 + 80, 160)
    assert by_type == {"ConstantFill": 40, "Copy": 80, "Cast": 80}
