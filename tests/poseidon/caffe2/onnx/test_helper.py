"""Single runs, and files of nets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe2 import core
from poseidon.caffe2.onnx import helper
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.errors import SnapshotError

X = np.float32([[1, -2]])


def nets() -> tuple[NetDef, NetDef]:
    init, net = core.Net("init"), core.Net("net")
    init.GivenTensorFill([], "w", shape=[2], values=[2.0, 3.0])
    net.Mul(["x", "w"], "y", broadcast=1)
    net.Relu("y", "z")
    net.Proto().external_output.extend(["y", "z"])
    return init.Proto(), net.Proto()


@pytest.mark.parametrize("inputs", [[X], {"x": X}])
def test_a_net_runs_once(inputs: object) -> None:
    workspace, outputs = helper.c2_native_run_net(*nets(), inputs)
    assert outputs.z.tolist() == outputs[1].tolist() == [[2, 0]]
    assert workspace.FetchBlob("y").tolist() == [[2, -6]]
    with pytest.raises(ValueError, match="2 inputs are given, there are 1"):
        helper.c2_native_run_net(*nets(), [X, X])


def test_without_an_init_net_and_where_it_makes_all() -> None:
    _, net = nets()
    _, outputs = helper.c2_native_run_net(None, net, [X, X[0]])
    assert outputs.y.tolist() == [[1, 4]]
    fill = core.Net("fill")
    for name in ("x", "w"):
        fill.ConstantFill([], name, shape=[2], value=1.0)
    assert helper.c2_native_run_net(fill.Proto(), net, [X])[1].y.tolist() == [[1, -2]]


def test_an_operator_runs_once() -> None:
    _, (y,) = helper.c2_native_run_op(core.CreateOperator("Relu", ["x"], ["y"]), [X])
    assert y.tolist() == [[1, 0]]


def test_files_and_times(tmp_path: Path) -> None:
    init, net = nets()
    file = tmp_path / "net.pb"
    helper.save_caffe2_net(net, str(file), output_txt=True)
    assert helper.load_caffe2_net(str(file)) == net
    assert helper.load_caffe2_net(f"{file}txt") == net
    with pytest.raises(SnapshotError, match="cannot read"):
        helper.load_caffe2_net(str(tmp_path / "none.pb"))
    init.op.extend([core.CreateOperator("ConstantFill", [], ["x"], shape=[1, 2])])
    assert helper.benchmark_caffe2_model(init, net, 0, 1, False) > 0
