"""Scopes that share parameters."""

from __future__ import annotations

import pytest

from poseidon.caffe2 import scope
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.modeling.initializers import Initializer
from poseidon.caffe2.modeling.parameter_sharing import ParameterSharing, parameter_sharing_context


def name() -> str:
    return parameter_sharing_context.get_parameter_name("w")


def test_parameters_are_named_after_the_scope() -> None:
    assert name() == "w"
    with scope.NameScope("a"), scope.NameScope("b"):
        assert name() == "a/b/w"


def test_a_scope_uses_the_parameters_of_another() -> None:
    with scope.NameScope("top"), ParameterSharing({"b": "a"}):
        assert name() == "top/w"
        with scope.NameScope("b"), ParameterSharing({"inner": ""}):
            assert name() == "top/a/w"
            with scope.NameScope("inner"):
                assert name() == "top/a/w"
        with scope.NameScope("c"):
            assert name() == "top/c/w"


def test_a_scope_does_not_share_with_a_scope_inside_it() -> None:
    with pytest.raises(AssertionError, match="is prefix of"), ParameterSharing({"a": "a/b"}):
        pass


def test_shared_parameters_are_made_once_and_have_one_shape() -> None:
    model = ModelHelper(name="shared")
    fill = Initializer("ConstantFill")
    with ParameterSharing({"b": "a"}):
        with scope.NameScope("a"):
            first = model.create_param("w", [2], fill)
        with scope.NameScope("b"):
            assert model.create_param("w", [2], fill) == first
            with pytest.raises(AssertionError, match="shape"):
                model.create_param("w", [3], fill)
    assert [str(p) for p in model.params] == ["a/w"]
    assert len(model.param_init_net.Proto().op) == 1
