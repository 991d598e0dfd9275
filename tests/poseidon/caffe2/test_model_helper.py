"""Models: parameters by scope, duplicates, shared parameters, gradients."""

from __future__ import annotations

import pytest

from poseidon.caffe2 import brew, core, scope
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.modeling.parameter_info import ParameterTags


def names(params: list[core.BlobReference]) -> list[str]:
    return sorted(str(p) for p in params)


def test_an_initializer_is_no_name() -> None:
    with pytest.raises(
        TypeError,
        match=r"^create_param: expected an Initializer, found 'XavierFill'",
    ):
        ModelHelper(name="m").create_param("p", [2], "XavierFill")


def test_parameters_are_listed_by_scope() -> None:
    model = ModelHelper(name="m")
    model.AddParameter(core.ScopedBlobReference("a"))
    with scope.NameScope("c"):
        model.AddParameter(core.ScopedBlobReference("a"))
        model.AddParameter(core.ScopedBlobReference("d"), tags=ParameterTags.COMPUTED_PARAM)
        assert names(model.GetParams()) == ["c/a"]
        assert names(model.GetAllParams()) == ["c/a", "c/d"]
        assert names(model.GetAllParams("")) == ["a", "c/a", "c/d"]
    assert names(model.GetComputedParams("c")) == names(model.GetComputedParams("c/")) == ["c/d"]


def test_a_parameter_is_added_once() -> None:
    model = ModelHelper(name="m")
    model.params += ["a", "b", "b"]
    assert model._Validate() == ["b"]
    with pytest.raises(AssertionError, match="Duplicate params"):
        model.Validate()


def test_a_model_shares_the_parameters_of_another() -> None:
    model = ModelHelper(name="m")
    step = ModelHelper(name="step", param_model=model)
    brew.fc(step, "x", "y", 3, 2)
    assert step._parameters_info is model._parameters_info
    assert names(model.params) == ["y_b", "y_w"]


def test_gradients_are_added_once_and_known_by_parameter() -> None:
    model = ModelHelper(name="m")
    with pytest.raises(RuntimeError, match="AddGradientOperators first"):
        model.get_param_to_grad(model.params)
    brew.fc(model, "x", "y", 3, 2)
    loss = model.net.AveragedLoss("y", "loss")
    model.AddGradientOperators([loss])
    assert {str(p): str(g) for p, g in model.param_to_grad.items()} == {
        "y_w": "y_w_grad",
        "y_b": "y_b_grad",
    }
    assert [str(info) for info in model.GetOptimizationParamInfo()] == ["y_w", "y_b"]
    with pytest.raises(RuntimeError, match="twice"):
        model.AddGradientOperators([loss])


def test_an_unknown_operator_is_named_with_its_neighbours() -> None:
    with pytest.raises(AttributeError, match="ConstantFil is not a registered"):
        ModelHelper(name="m").ConstantFil([], "x")


def test_a_complete_net_is_taken_apart_again() -> None:
    model = ModelHelper(name="whole")
    x = brew.spatial_bn(model, brew.conv(model, "x", "c", 2, 3, kernel=1), "n", 3, is_test=False)
    brew.fc(model, x, "y", 3, 2)
    model.net.Proto().type = "async_scheduling"
    complete = model.GetCompleteNet()
    assert complete.Name() == "whole_complete_net"
    assert [str(blob) for blob in complete.external_inputs] == ["x"]
    fillers, net = model.param_init_net.Proto(), model.net.Proto()
    for op in fillers.op:
        op.debug_info += "/param_init_net"
    assert [*complete.Proto().op] == [*fillers.op, *net.op]

    other = ModelHelper(name="other")
    other.ConstructInitTrainNetfromNet(complete)
    assert [*other.param_init_net.Proto().op] == [*fillers.op]
    assert [*other.net.Proto().op] == [*net.op]
    inputs = [str(blob) for blob in other.net.external_inputs]
    assert inputs == ["x", "c_w", "c_b", "n_s", "n_b", "n_rm", "n_riv", "y_w", "y_b"]
    assert sorted(inputs) == names(model.net.external_inputs)
    for made in (complete, other.param_init_net, other.net):
        assert made.Proto().type == "async_scheduling"


def test_weight_decay_is_a_method_too() -> None:
    model = ModelHelper(name="m")
    brew.fc(model, "x", "y", 3, 2)
    with pytest.raises(RuntimeError, match="the weight y_w has no gradient"):
        model.AddWeightDecay(0.1)
    model.net.AveragedLoss("y", "loss")
    model.AddGradientOperators(["loss"])
    model.AddWeightDecay(0.1)
    decay = model.net.Proto().op[-1]
    assert (decay.type, list(decay.input), list(decay.output)) == (
        "WeightedSum",
        ["y_w_grad", "ONE", "y_w", "wd"],
        ["y_w_grad"],
    )
