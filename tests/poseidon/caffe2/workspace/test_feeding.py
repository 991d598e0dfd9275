"""Random inputs of nets: shapes, types, ranges, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace


@pytest.fixture
def net() -> core.Net:
    """A net whose first and third operator read from outside; the second does not."""
    made = core.Net("random")
    made.Add(["a", "b"], "c")
    made.Relu("c", "d")
    made.Gather(["d", "rows"], "e")
    return made


def test_what_the_net_reads_is_filled(net: core.Net) -> None:
    types = [["float", "float"], ["int"]]
    workspace.FillRandomNetworkInputs(net, [[(2, 30), (2, 30)], [[5]]], types)
    assert sorted(workspace.Blobs()) == ["a", "b", "rows"]
    a, b, rows = workspace.FetchBlobs(["a", "b", "rows"])
    assert a.shape == b.shape == (2, 30) and a.dtype == np.float32
    assert ((a >= 0) & (a < 1)).all() and (a != b).any()
    assert rows.shape == (5,) and rows.dtype == np.int32 and set(rows) <= {0, 1}
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("e").shape == (5, 30)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("double", np.float64), ("unsigned char", np.uint8), ("long", np.int64), ("bool", np.bool_)],
)
def test_types(net: core.Net, kind: str, dtype: Any) -> None:
    workspace.FillRandomNetworkInputs(net.Proto(), [[[40], [40]], [[40]]], [[kind] * 2, [kind]])
    value = workspace.FetchBlob("b")
    assert value.dtype == dtype
    assert len(set(value)) > 1


@pytest.mark.parametrize(
    ("dims", "types", "message"),
    [
        ([[[2], [2]]], [["int"] * 2], "1 shapes are given, 2 expected: Add reads a, b; Gather"),
        ([[[2]], [[2]]], [["int"] * 2, ["int"]], "1 shapes are given, 2 expected: a; b"),
        ([[[2], [2]], [[2]]], [["int"] * 3, ["int"]], "3 types are given, 2 expected: a; b"),
    ],
)
def test_other_numbers_are_refused(net: core.Net, dims: Any, types: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        workspace.FillRandomNetworkInputs(net, dims, types)
    assert workspace.Blobs() == []


def test_an_unknown_type_and_a_net_without_inputs_are_refused(net: core.Net) -> None:
    with pytest.raises(ValueError, match="there is no type 'half'; the types are float, double"):
        workspace.FillRandomNetworkInputs(net, [[[2], [2]], [[2]]], [["float", "half"], ["int"]])
    with pytest.raises(RuntimeError, match="reads no blob that it does not make"):
        workspace.FillRandomNetworkInputs(core.Net("nothing"), [], [])
