"""Helpers, their default arguments, and the parameters that they make."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.caffe2 import brew, core
from poseidon.caffe2.model_helper import ModelHelper


def value_of(model: Any, val: int = -1) -> int:
    return val


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(brew._registry, "value_of", value_of)
    return "value_of"


def test_arguments_come_from_contexts_and_the_call(helper: str) -> None:
    model = ModelHelper(name="m")
    with brew.arg_scope([value_of], val=3):
        assert brew.value_of(model) == 3
        with brew.arg_scope(value_of, val=4):
            assert brew.value_of(model) == 4
            assert brew.value_of(model, val=5) == 5
        assert brew.value_of(model) == 3
    assert brew.value_of(model) == -1


def test_a_name_is_registered_once(helper: str) -> None:
    assert brew.has_helper(value_of)
    assert brew.has_helper("fc")
    assert not brew.has_helper("no_such")
    with pytest.raises(AttributeError, match="already exists"):
        brew.Register(value_of)
    with pytest.raises(AttributeError, match="not registered"):
        brew.no_such  # noqa: B018
    with pytest.raises(AssertionError, match=r"^arg_scope: expected helpers"):
        brew.arg_scope(["fc"])
    with pytest.raises(RuntimeError, match="should be model"):
        brew.fc("x", "y", 3, 2)


def test_layer_norm_has_a_scale_for_each_element_of_several_dimensions() -> None:
    model = ModelHelper("model")
    brew.layer_norm(model, "x", "y", dim_in=(3, 4), axis=1)
    fills = {op.output[0]: op for op in model.param_init_net.Proto().op}
    for name in ("y_scale", "y_bias"):
        assert [list(arg.ints) for arg in fills[name].arg if arg.name == "shape"] == [[3, 4]]


def test_a_filler_with_more_than_name_and_arguments_is_taken() -> None:
    model = ModelHelper(name="m")
    brew.fc(model, "x", "y", 3, 2, ("UniformFill", {"min": -1.0}, {"max": 1.0}))
    assert [op.type for op in model.param_init_net.Proto().op] == ["UniformFill", "ConstantFill"]


def test_accuracy_takes_the_best_classes_on_a_gpu_only(caplog: pytest.LogCaptureFixture) -> None:
    model = ModelHelper(name="m")
    brew.accuracy(model, ["p", "l"], "best", top_k=3)
    assert "leaves top_k=3 out on the CPU" in caplog.text
    with core.DeviceScope(core.DeviceOption(1, 0)):
        blobs = model.net.AddExternalInput("pg", "lg")
        brew.accuracy(model, blobs, "several", top_k=3)
        brew.accuracy(model, blobs, "one", top_k=1)
    made = [
        (
            op.type,
            list(op.input),
            {arg.name: arg.i for arg in op.arg}.get("top_k"),
            op.device_option.device_type,
        )
        for op in model.net.Proto().op
    ]
    assert made == [
        ("Accuracy", ["p", "l"], None, 0),
        ("CopyGPUToCPU", ["pg"], None, 1),
        ("CopyGPUToCPU", ["lg"], None, 1),
        ("Accuracy", ["pg_host", "lg_host"], 3, 0),
        ("Accuracy", ["pg", "lg"], None, 1),
    ]
    assert len(caplog.records) == 1
