"""Values that are dead before they are overwritten."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.runtime.lifetimes import overwritten
from poseidon.caffe2.workspace.current import current


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    workspace.ResetWorkspace()
    yield
    workspace.ResetWorkspace()


def reused(kind: str = "simple") -> core.Net:
    """`s` is made by operator 0, read by 1, and made again by 2."""
    net = core.Net("reused")
    net.Proto().type, net.Proto().num_workers = kind, 2
    net.Copy("data", "s")
    net.Copy("s", "a")
    net.Copy("a", "s")
    net.Copy("s", "s")
    return net


def test_what_is_overwritten() -> None:
    assert list(overwritten(reused().Proto().op)) == [("s", 1, 2)]
    outside = core.Net("outside")
    outside.Copy("s", "a")
    outside.Copy("a", "s")
    assert list(overwritten(outside.Proto().op)) == []


def test_blobs_that_operators_may_read_unseen() -> None:
    net = reused()
    net.Python(lambda inputs, outputs: None)([], ["s"])
    assert list(overwritten(net.Proto().op)) == []
    inner, other = core.Net("inner"), reused()
    inner.Copy("s", "t")
    other.Proto().op.add(type="If", input=["c"]).arg.add(name="then_net").n.CopyFrom(inner.Proto())
    assert list(overwritten(other.Proto().op)) == []


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_a_dead_value_is_freed(kind: str) -> None:
    workspace.FeedBlob("data", np.float32([1, 2]))
    reusing = reused(kind)
    workspace.CreateNet(reusing)
    net = current().nets[reusing.Name()]
    blob = current().get("s")
    empty = []
    for step in net.steps:
        step()
        empty.append(blob.value is None)
    assert empty == ([False, True, False, False] if kind == "simple" else [False] * 4)
    workspace.RunNet(reusing, 3)
    assert workspace.FetchBlob("s").tolist() == [1, 2]
