"""The contract of operators: signature as schema, arguments, errors, gradient rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from poseidon.caffe2 import workspace
from poseidon.caffe2.core import CreateOperator
from poseidon.caffe2.operators import registry
from poseidon.caffe2.operators.gradients import GradientMaker, Sparse, parse_rule
from poseidon.caffe2.operators.registry import Context, find, nearest, operator
from poseidon.caffe2.runtime.bind import function_of


@dataclass(frozen=True)
class Limits:
    low: float = 0.5
    steps: tuple[int, ...] = ()


LIMITS = Limits()


@pytest.fixture
def example() -> Iterator[None]:
    @operator("ExampleForTests", gradient="ExampleGradient(I0, GO0) -> GI0")
    def function(
        x: Tensor,
        y: Tensor | None = None,
        *,
        context: Context,
        size: int,
        min_: float = 0.5,
        names: list[str] = [],  # noqa: B006
        limits: Limits = LIMITS,
    ) -> tuple[Tensor, Tensor]:
        return x + size, x * min_

    yield
    del registry._operators["ExampleForTests"]


@pytest.mark.usefixtures("example")
def test_the_signature_is_the_schema() -> None:
    found = find("ExampleForTests")
    assert found.inputs == (1, 2)
    assert found.outputs == (1, 2)
    assert not found.single
    assert found.context == "context"
    assert sorted(found.parameters) == ["low", "min", "names", "size", "steps"]


@pytest.mark.usefixtures("example")
def test_arguments_are_converted_and_unknown_ones_ignored() -> None:
    definition = CreateOperator(
        "ExampleForTests", "x", "y", size=3, min=1, names=["a", "b"], order="NCHW"
    )
    wanted = {"size": 3, "min_": 1.0, "names": ["a", "b"]}
    assert find("ExampleForTests").arguments(definition) == wanted


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("inputs", "arguments", "message"),
    [
        (["x"], {}, "the argument size is required"),
        (["x"], {"size": "three"}, "the argument size has no value of type int"),
        (["x", "y", "z"], {"size": 3}, "3 inputs are given, 1 to 2 expected"),
        ([], {"size": 3}, "0 inputs are given, 1 to 2 expected"),
    ],
)
def test_a_mistake_is_one_sentence(
    inputs: list[str], arguments: dict[str, object], message: str
) -> None:
    definition = CreateOperator("ExampleForTests", inputs, "y", **arguments)
    with pytest.raises(ValueError, match=message):
        find("ExampleForTests").check(definition)
        find("ExampleForTests").arguments(definition)


def test_an_unknown_operator_names_the_nearest() -> None:
    assert nearest("Relo")[0] == "Relu"
    with pytest.raises(KeyError, match="there is no operator Relo; the nearest are Relu"):
        find("Relo")


@pytest.mark.parametrize(
    ("rule", "operators", "gradients"),
    [
        ("G(I0, O0, GO0) -> GI0", ["G(x, y, dy) -> x_grad"], ["x_grad", None]),
        ("G(I*, GO*) -> GI*", ["G(x, w, dy) -> x_grad,w_grad"], ["x_grad", "w_grad"]),
        ("G(I2?, GO0) -> GI1, _GI1_dims", ["G(dy) -> w_grad,_w_grad_dims"], [None, "w_grad"]),
        (
            "A(GO0) -> GI0 {scale=2.0}; B(GI0) -> GI0",
            ["A(dy) -> x_grad", "B(x_grad) -> x_grad"],
            ["x_grad", None],
        ),
        ("GI0 = GO0", [], ["dy", None]),
        ("GI0 = (I1, GO0)", [], [Sparse("w", "dy"), None]),
        ("", [], [None, None]),
    ],
)
def test_rules(rule: str, operators: list[str], gradients: list[object]) -> None:
    maker = GradientMaker(CreateOperator("F", ["x", "w"], ["y"], axis=1), ["dy"])
    parse_rule(rule)(maker)
    assert [
        f"{op.type}({', '.join(op.input)}) -> {','.join(op.output)}" for op in maker.operators
    ] == operators
    assert maker.gradients == gradients
    assert all(op.is_gradient_op for op in maker.operators)
    assert all(op.arg[0].name == ("scale" if op.type == "A" else "axis") for op in maker.operators)


@pytest.mark.parametrize("rule", ["G(X0) -> GI0", "G(I0)", "GI0 <- GO0"])
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="no"):
        parse_rule(rule)(GradientMaker(CreateOperator("F", ["x"], ["y"]), ["dy"]))


def test_a_missing_gradient_is_named() -> None:
    maker = GradientMaker(CreateOperator("F", ["x"], ["y", "z"]), ["dy", None])
    with pytest.raises(ValueError, match="the gradient of the output z is missing"):
        parse_rule("G(GO1) -> GI0")(maker)


def test_no_operator_is_registered_by_two_modules() -> None:
    assert workspace.RegisteredOperators()
    assert registry.registered_twice == []


def test_torchs_own_function_is_called_where_no_argument_is_given() -> None:
    plain = function_of(CreateOperator("Add", ["a", "b"], "y"), None)
    assert plain is torch.add
    assert function_of(CreateOperator("Add", ["a", "b"], "y", broadcast=1), None) is not torch.add
