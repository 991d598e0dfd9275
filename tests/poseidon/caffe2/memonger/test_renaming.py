"""Renamed nets, and whether they compute the same."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from poseidon.caffe2 import core, memonger
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.lifetimes import nested_blobs


def diamond(*names: str) -> Any:
    """Two paths of two operators from `names[0]` to a sum."""
    x, y, z, u, v = names
    net = core.Net("diamond")
    for read, made in (("data", x), (x, y), (x, z), (y, u), (z, v)):
        net.Copy(read, made)
    net.Add([u, v], "out")
    return net.Proto()


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (("a", "b", "c", "d", "e"), True),
        (("x", "y", "z", "y", "z"), True),
        (("x", "y", "y", "u", "v"), False),
        (("x", "y", "z", "u", "u"), False),
    ],
)
def test_equality_does_not_look_at_names(names: tuple[str, ...], same: bool) -> None:
    assert memonger.verify_graph_equality(diamond("x", "y", "z", "u", "v"), diamond(*names)) is same


def test_other_operators_are_not_equal() -> None:
    one, other = core.Net("n"), core.Net("n")
    one.Copy("a", "b")
    assert not memonger.verify_graph_equality(one.Proto(), other.Proto())
    other.Copy("a", "b", engine="CUDNN")
    assert not memonger.verify_graph_equality(one.Proto(), other.Proto())


def test_operators_in_place() -> None:
    one, other = core.Net("n"), core.Net("n")
    one.Relu("a", "a")
    other.Relu("a", "b")
    assert memonger.verify_inplace_blobs(one.Proto(), one.Proto())
    assert not memonger.verify_inplace_blobs(one.Proto(), other.Proto())


@pytest.mark.parametrize("as_text", [False, True])
def test_step_nets_are_renamed_too(as_text: bool) -> None:
    step = caffe2_pb2.NetDef(name="step", external_input=["h", "w"], external_output=["o"])
    step.op.add(type="Mul", input=["h", "w"], output=["o"])
    net = caffe2_pb2.NetDef(name="rnn")
    op = net.op.add(type="RecurrentNetwork", input=["w", "x"], output=["y"])
    argument = op.arg.add(name="step_net")
    if as_text:
        argument.s = str(step).encode()
    else:
        argument.n.CopyFrom(step)
    assert nested_blobs(net.op) == {"h", "w", "o"}
    memonger.apply_assignments(net, {"w": "m", "o": "n", "y": "z"})
    inner = text_format.Parse(argument.s.decode(), caffe2_pb2.NetDef()) if as_text else argument.n
    assert (list(inner.op[0].input), list(inner.op[0].output)) == (["h", "m"], ["n"])
    assert list(inner.external_input) == ["h", "m"]
    assert (list(op.input), list(op.output)) == (["m", "x"], ["z"])
    assert {a.name: a.s for a in op.arg if a.name.endswith(".rename")} == {
        "w.rename": b"m",
        "y.rename": b"z",
    }
