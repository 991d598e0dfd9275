"""`workspace.C`, the immediate mode, predictors, costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    workspace.StopImmediate()


def test_a_workspace_of_its_own() -> None:
    ws = workspace.C.Workspace()
    assert ws.nets == {} and ws.blobs == {}
    net = core.Net("own")
    net.ConstantFill([], "c", shape=[2], value=1.5)
    ws.create_net(net).run()
    assert ws.blobs["c"].fetch().tolist() == [1.5, 1.5]
    assert list(ws.nets) == [net.Name()]
    with pytest.raises(RuntimeError, match="exists"):
        ws.create_net(net)
    assert not workspace.HasBlob("c")
    with pytest.raises(TypeError, match="str is not a NetDef"):
        ws.create_net("net")


@pytest.mark.parametrize(
    "make",
    [
        lambda net: net,
        lambda net: net.Proto().op[0],
        lambda net: core.Plan(core.execution_step("s", net)),
    ],
)
def test_nets_operators_and_plans_run(make: object) -> None:
    ws = workspace.C.Workspace()
    net = core.Net("runs")
    net.ConstantFill([], "c", shape=[1])
    ws.run(make(net))  # type: ignore[operator]
    assert "c" in ws.blobs


def test_the_current_workspace() -> None:
    workspace.FeedBlob("x", np.ones(2))
    assert workspace.C.Workspace.current.blobs["x"].fetch().tolist() == [1, 1]


def test_a_tensor_is_seen_and_changed() -> None:
    tensor = workspace.C.Workspace().create_blob("x").tensor()
    tensor.feed(np.array([1.0, 2.0]))
    tensor.data[0] = 3
    assert tensor.fetch().tolist() == [3, 2]
    tensor.init([2, 3], core.DataType.INT32)
    assert (tensor.data.dtype, tensor.shape) == (np.int32, (2, 3))
    tensor.reshape([6])
    assert tensor.shape == (6,)
    tensor.feed(np.array([[b"a"]], dtype=object))
    assert tensor.data[0, 0] == b"a"
    with pytest.raises(RuntimeError, match="cannot be set from Python"):
        tensor.init([1], core.DataType.STRING)


def test_blobs_are_serialized() -> None:
    blob = workspace.C.Workspace().create_blob("x")
    blob.feed(np.arange(4).reshape(2, 2))
    workspace.DeserializeBlob("y", blob.serialize("x"))
    assert workspace.FetchBlob("y").tolist() == [[0, 1], [2, 3]]
    workspace.FeedBlob("text", b"abc")
    workspace.DeserializeBlob("y", workspace.SerializeBlob("text"))
    assert workspace.FetchBlob("y") == b"abc"


def test_operators_run_as_they_are_created() -> None:
    workspace.StartImmediate(i_know=True)
    folder = workspace._immediate_root_folder
    assert os.path.isdir(folder)
    core.Net("immediate").ConstantFill([], "c", shape=[2], value=1.0)
    assert workspace.ImmediateBlobs() == ["c"]
    assert not workspace.HasBlob("c")
    workspace.FeedImmediate("c", 2 * workspace.FetchImmediate("c"))
    assert workspace.FetchImmediate("c").tolist() == [2, 2]
    workspace.StopImmediate()
    assert not os.path.exists(folder)
    assert workspace._immediate_root_folder == ""
    with pytest.raises(RuntimeError, match="Can't find blob"):
        workspace.FetchImmediate("c")


def test_a_predictor() -> None:
    init, net = core.Net("init"), core.Net("predict")
    init.ConstantFill([], "w", shape=[1, 2], value=2.0)
    init.ConstantFill([], "b", shape=[1], value=1.0)
    net.AddExternalOutput(net.FC(["x", "w", "b"], "y"))
    predictor = workspace.Predictor(init.Proto().SerializeToString(), net.Proto())
    for given in ([np.ones((1, 2), dtype=np.float32)], {"x": np.ones((1, 2), dtype=np.float32)}):
        assert [out.tolist() for out in predictor.run(given)] == [[[5.0]]]
    with pytest.raises(RuntimeError, match="4 inputs are given, the net has 3"):
        predictor.run([np.ones(2)] * 4)
    with pytest.raises(TypeError, match="run: expected a list of an array for each input"):
        predictor.run(np.ones((1, 2), dtype=np.float32))
    with pytest.raises(RuntimeError, match="The net has no input X: only x, w, b"):
        predictor.run({"X": np.ones((1, 2), dtype=np.float32)})
    assert predictor.run([])[0].tolist() == [[5.0]]
    with pytest.raises(RuntimeError, match="Expected a net or the bytes of a NetDef"):
        workspace.Predictor("init_net.pb", "predict_net.pb")


def test_a_predictor_replaces_what_the_init_net_makes() -> None:
    init, net = core.Net("init"), core.Net("predict")
    init.ConstantFill([], "a", shape=[2], value=2.0)
    init.ConstantFill([], "b", shape=[2], value=1.0)
    net.AddExternalOutput(net.Sub(["a", "b"], "c"))
    predictor = workspace.Predictor(init, net)
    assert predictor.run([])[0].tolist() == [1, 1]
    assert predictor.run([np.float32([5, 6]), np.float32([3, 3])])[0].tolist() == [2, 3]
    assert predictor.run({"b": np.float32([1, 1])})[0].tolist() == [4, 5]


def test_sizes() -> None:
    workspace.FeedBlob("x", np.zeros((2, 3), dtype=np.int16))
    workspace.FeedBlob("s", np.array([b"abc", b"d"]))
    workspace.FeedBlob("t", np.array([b"", b""]))
    assert workspace.GetBlobSizeBytes("x") == 12
    assert workspace.GetBlobSizeBytes("s") - workspace.GetBlobSizeBytes("t") == 4


def test_the_transform_that_exists() -> None:
    net = core.Net("transformed")
    net.Proto().op.add().CopyFrom(core.CreateOperator("Conv", ["x", "w"], "y", kernel=3))
    assert workspace.ApplyTransform("ConvToNNPack", net).op[0].engine == "NNPACK"
    assert net.Proto().op[0].engine == ""
    with pytest.raises(RuntimeError, match="There is no transform Other"):
        workspace.ApplyTransform("Other", net)


def test_a_database_is_written_when_it_is_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "x.db")
    pairs = [(b"b", b"2"), (b"a", b"1")]
    assert core.C is workspace.C  # scripts write core.C.create_db
    written = workspace.C.create_db("minidb", path, workspace.C.Mode.new)
    transaction = written.new_transaction()
    for key, value in pairs:
        transaction.put(key, value)
    transaction.commit()
    written.close()
    cursor = workspace.C.create_db("minidb", path, workspace.C.Mode.read).new_cursor()
    found = []
    while cursor.valid():
        found.append((cursor.key(), cursor.value()))
        cursor.next()
    assert found == pairs
    cursor.seek_to_first()
    assert cursor.key() == b"b"
    with pytest.raises(RuntimeError, match="exists"):
        workspace.C.create_db("minidb", path, workspace.C.Mode.new)
    with pytest.raises(RuntimeError, match="open for reading"):
        workspace.C.create_db("minidb", path, workspace.C.Mode.read).new_transaction()
    assert "minidb" in workspace.C.registered_dbs()
