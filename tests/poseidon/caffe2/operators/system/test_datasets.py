"""Vectors of tensors."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import call


@pytest.mark.parametrize(("most", "kept"), [(-1, 6), (3, 3)])
def test_tensors_are_collected_together(most: int, kept: int) -> None:
    for name in ("v", "w"):
        call("CreateTensorVector", [], [name])
    net = core.Net("collect")
    option = core.DeviceOption(0, random_seed=5)
    net.CollectTensor(["v", "w", "x", "y"], ["v", "w"], num_to_collect=most, device_option=option)
    for step in range(6):
        workspace.FeedBlob("x", np.array([step], "f4"))
        workspace.FeedBlob("y", np.array([10 * step], "f4"))
        if step == 0:
            workspace.CreateNet(net)
        workspace.RunNet(net)
    for name in ("v", "w"):
        call("ConcatTensorVector", [name], [f"{name}_all"])
        call("TensorVectorSize", [name], [f"{name}_size"])
        assert workspace.FetchBlob(f"{name}_size") == kept
    first, second = workspace.FetchBlob("v_all"), workspace.FetchBlob("w_all")
    np.testing.assert_array_equal(second, 10 * first)
    assert len(set(first.tolist())) == kept


def test_an_empty_vector_cannot_be_joined() -> None:
    call("CreateTensorVector", [], ["v"])
    with pytest.raises(RuntimeError, match="no tensors to join"):
        call("ConcatTensorVector", ["v"], ["x"])


COLUMNS = {
    "a": np.array([1.0, 2.0], "f4"),
    "b:lengths": np.array([2, 1], "i4"),
    "b:values": np.array([7, 8, 9]),
}


@pytest.mark.parametrize("single", [False, True])
def test_packed_records_are_unpacked(single: bool) -> None:
    for name, value in COLUMNS.items():
        workspace.FeedBlob(name, value)
    net = core.Net("records")
    net.PackRecords(list(COLUMNS), "packed", fields=list(COLUMNS), pack_to_single_shared_ptr=single)
    names = [f"{name}_new" for name in COLUMNS]
    net.UnPackRecords(["packed", *COLUMNS], names, fields=list(COLUMNS))
    workspace.RunNetOnce(net)
    assert len(workspace.FetchBlob("packed")) == (1 if single else 2)
    for name, value in COLUMNS.items():
        np.testing.assert_array_equal(workspace.FetchBlob(f"{name}_new"), value)


def test_no_records_need_prototypes() -> None:
    workspace.FeedBlob("a", np.zeros(0, "f4"))
    net = core.Net("none")
    net.PackRecords(["a"], "packed", fields=["a"])
    net.UnPackRecords(["packed", "a"], ["b"], fields=["a"])
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("b").shape == (0,)
    with pytest.raises(RuntimeError, match="nor prototypes"):
        call("UnPackRecords", ["packed"], ["b"], fields=["a"])
