"""Vectors of tensors."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace


def run(kind: str, inputs: list[str], outputs: list[str]) -> None:
    workspace.RunOperatorOnce(core.CreateOperator(kind, inputs, outputs))


@pytest.mark.parametrize(("most", "kept"), [(-1, 6), (3, 3)])
def test_tensors_are_collected_together(most: int, kept: int) -> None:
    workspace.ResetWorkspace()
    for name in ("v", "w"):
        run("CreateTensorVector", [], [name])
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
        run("ConcatTensorVector", [name], [f"{name}_all"])
        run("TensorVectorSize", [name], [f"{name}_size"])
        assert workspace.FetchBlob(f"{name}_size") == kept
    first, second = workspace.FetchBlob("v_all"), workspace.FetchBlob("w_all")
    np.testing.assert_array_equal(second, 10 * first)
    assert len(set(first.tolist())) == kept


def test_an_empty_vector_cannot_be_joined() -> None:
    workspace.ResetWorkspace()
    run("CreateTensorVector", [], ["v"])
    with pytest.raises(RuntimeError, match="no tensors to join"):
        run("ConcatTensorVector", ["v"], ["x"])
