"""Predictors in a database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import brew, core, model_helper, workspace
from poseidon.caffe2.predictor import predictor_exporter, predictor_py_utils
from poseidon.caffe2.predictor_constants import predictor_constants as names
from poseidon.caffe2.proto import caffe2_pb2, metanet_pb2
from poseidon.caffe2.runtime import databases

WEIGHT = np.arange(15, dtype=np.float32).reshape(3, 5)


def meta_of(**more: Any) -> Any:
    """The predictor y = x W^T + 1 whose parameters are in the workspace."""
    model = model_helper.ModelHelper(name="m")
    brew.fc(model, "x", "y", 5, 3)
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("y_w", WEIGHT)
    workspace.FeedBlob("y_b", np.ones(3, np.float32))
    given = {"shapes": {"x": (1, 5), "y": (1, 3)}, "inputs": ["x"], "outputs": ["y"], **more}
    return predictor_exporter.PredictorExportMeta(model.net, parameters=model.params, **given)


def test_the_parts_of_the_file(tmp_path: Path) -> None:
    extra, beside = core.Net("extra"), core.Net("beside")
    extra.ConstantFill("x", "x", value=1.0)
    beside.ConstantFill([], "table", shape=[1], value=4.0)
    path = str(tmp_path / "p.minidb")
    meta = meta_of(
        name="n", extra_init_net=extra, global_init_net=beside, net_type="dag", num_workers=3
    )
    meta.predict_net.arg.add(name="model_id", i=7)
    predictor_exporter.save_to_db("minidb", path, meta)
    workspace.ResetWorkspace()
    loaded = predictor_exporter.load_from_db(path, "minidb")
    assert workspace.Blobs() == [names.META_NET_DEF, names.PREDICTOR_DBREADER]
    assert sorted(net.key for net in loaded.nets) == [
        "GLOBAL_INIT_NET_TYPE_n",
        "PREDICT_INIT_NET_TYPE_n",
        "PREDICT_NET_TYPE_n",
    ]
    for key, blobs in ((meta.inputs_name(), ["x"]), (meta.outputs_name(), ["y"])):
        assert list(predictor_py_utils.GetBlobs(loaded, key)) == blobs
    assert predictor_py_utils.GetBlobs(loaded, "none") == []
    net = predictor_py_utils.GetNet(loaded, meta.predict_net_name())
    assert (net.type, net.num_workers, list(net.external_input)) == ("dag", 3, ["x", "y_w", "y_b"])
    for key in (meta.predict_init_name(), meta.global_init_name()):
        part = predictor_py_utils.GetNet(loaded, key)
        assert predictor_py_utils.GetArgumentByName(part, "model_id").i == 7
        workspace.RunNetOnce(part)
    assert workspace.FetchBlob("x").tolist() == [[1] * 5]
    assert workspace.FetchBlob("table").tolist() == [4]
    assert workspace.FetchBlob("y_w").tolist() == WEIGHT.tolist()


def test_the_device_of_a_loaded_predictor(tmp_path: Path) -> None:
    path = str(tmp_path / "p.minidb")
    predictor_exporter.save_to_db("minidb", path, meta_of())
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CPU, 1)):
        loaded = predictor_exporter.load_from_db(path, "minidb")
    assert {op.device_option.device_id for net in loaded.nets for op in net.value.op} == {1}
    loaded = predictor_exporter.load_from_db(path, "minidb", core.DeviceOption(caffe2_pb2.CPU, 2))
    assert {op.device_option.device_id for net in loaded.nets for op in net.value.op} == {2}


def test_what_is_refused(tmp_path: Path) -> None:
    for more, message in (
        ({"inputs": ["x", "x"]}, "are not unique"),
        ({"inputs": ["x", "y_w"]}, r"inputs of a predictor must be disjoint: \['y_w'\]"),
        ({"outputs": ["y", "y_b"]}, "outputs of a predictor must be disjoint"),
    ):
        with pytest.raises(AssertionError, match=message):
            meta_of(**more)
    meta = meta_of(shapes=None)
    with pytest.raises(Exception, match="x is not in the workspace, and its shape is not given"):
        predictor_exporter.save_to_db("minidb", str(tmp_path / "p.minidb"), meta)
    meta = meta_of()
    workspace.ResetWorkspace()
    with pytest.raises(RuntimeError, match="y_w"):
        predictor_exporter.save_to_db("minidb", str(tmp_path / "p.minidb"), meta)
    databases.write_records(str(tmp_path / "q"), "minidb", [(b"key", b"")])
    with pytest.raises(RuntimeError, match="META_NET_DEF"):
        predictor_exporter.load_from_db(str(tmp_path / "q"), "minidb")


def test_shapes_come_from_the_workspace() -> None:
    meta = meta_of(shapes=None)
    workspace.FeedBlob("x", np.zeros((4, 5), np.float32))
    workspace.FeedBlob("y", np.zeros((4, 3), np.float32))
    proto = predictor_exporter.get_meta_net_def(meta)
    init = predictor_py_utils.GetNet(proto, names.PREDICT_INIT_NET_TYPE)
    assert [list(op.arg[0].ints or op.arg[1].ints) for op in init.op] == [[4, 5], [4, 3]]


def test_keys_and_lists_of_a_message() -> None:
    proto, utils = metanet_pb2.MetaNetDef(), predictor_py_utils
    utils.AddBlobs(proto, "a", ["x"])
    utils.AddBlobs(proto, "a", ["y"])
    utils.AddBlobs(proto, "ab", ["x", "z"])
    utils.AddPlan(proto, "p", caffe2_pb2.PlanDef(name="plan"))
    utils.SetBlobsOrder(proto, ["b", "a"])
    utils.SetPreLoadBlobs(proto, ["a"])
    proto.applicationSpecificInfo.add(key="k", value="v")
    assert utils.GetBlobsByTypePrefix(proto, "a") == ["x", "y", "z"]
    utils.ReplaceBlobs(proto, "a", ["q"])
    assert list(utils.GetBlobs(proto, "a")) == ["q"]
    assert utils.GetPlan(proto, "p").name == "plan" and utils.GetNet(proto, "p") is None
    assert utils.GetApplicationSpecificInfo(proto, "k") == "v"
    assert utils.GetApplicationSpecificInfoDict(proto) == {"k": "v"}
    predictor_exporter.set_model_info(proto, "project", "class", "2")
    assert (proto.modelInfo.project, proto.modelInfo.version) == ("project", "2")
    copy = predictor_py_utils.deserialize_protobuf_struct(
        predictor_py_utils.serialize_protobuf_struct(proto), metanet_pb2.MetaNetDef
    )
    assert copy == proto
    assert (
        predictor_exporter.get_predictor_exporter_helper("s").train_plan_name()
        == "TRAIN_PLAN_TYPE_s"
    )
