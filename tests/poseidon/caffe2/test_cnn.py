"""The older interface."""

from __future__ import annotations

import pytest

from poseidon.caffe2.cnn import CNNModelHelper


def test_layers_are_methods() -> None:
    model = CNNModelHelper(order="NHWC", name="m")
    assert model.arg_scope["order"] == "NHWC"
    model.FC("x", "y", 3, 2, model.ConstantInit(1.0), model.ZeroInit)
    assert [op.type for op in model.net.Proto().op] == ["FC"]
    assert [op.type for op in model.param_init_net.Proto().op] == ["ConstantFill", "ConstantFill"]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="storage order CHW"):
        CNNModelHelper(order="CHW")
