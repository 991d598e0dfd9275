"""AbsVal, Power, Exp, Log: the formulas, the constants that Caffe singles out, and mistakes."""

from __future__ import annotations

import math

import pytest
import torch

from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise

X = noise(3, 4).abs() + 0.1

VALUES = [
    ("AbsVal", "", X.abs()),
    ("Power", "", X),
    ("Power", "power_param { scale: -2 shift: 1 }", 1 - 2 * X),
    ("Power", "power_param { power: -0.5 scale: 2 }", 1 / (2 * X).sqrt()),
    ("Power", "power_param { power: 0 scale: 0 shift: 3 }", torch.ones(3, 4)),
    ("Power", "power_param { power: 3 scale: 0 shift: 2 }", torch.full((3, 4), 8.0)),
    ("Power", "power_param { power: -1 scale: 0 shift: 0 }", torch.full((3, 4), math.inf)),
    ("Exp", "", X.exp()),
    ("Exp", "exp_param { base: -1 scale: 2 shift: 1 }", (2 * X + 1).exp()),
    ("Exp", "exp_param { base: 2 scale: 0.5 shift: 0.1 }", 2 ** (0.5 * X + 0.1)),
    ("Exp", "exp_param { base: 1 shift: 3 }", torch.ones(3, 4)),
    ("Log", "", X.log()),
    ("Log", "log_param { base: 10 scale: 2 shift: 0.3 }", (2 * X + 0.3).log10()),
    ("Log", "log_param { base: 0.5 shift: 1 }", -(X + 1).log2()),
]


@pytest.mark.parametrize(("kind", "body", "expected"), VALUES)
def test_values(kind: str, body: str, expected: torch.Tensor) -> None:
    net = build(inputs(x=(3, 4)) + layer(kind, "x", "y", body))
    torch.testing.assert_close(net({"x": X})["y"], expected)


@pytest.mark.parametrize("body", ["power: 0", "scale: 0 shift: 2", "scale: 0 power: -1"])
def test_a_constant_has_the_zero_gradient(body: str) -> None:
    x = torch.tensor([0.0, -1, 2]).requires_grad_()
    net = build(inputs(x=(3,)) + layer("Power", "x", "y", f"power_param {{ {body} }}"))
    net({"x": x})["y"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0]


def test_a_power_that_changes_nothing_may_be_overwritten() -> None:
    """The layer above runs in place; the blob below is still read by another."""
    text = inputs(x=(2, 3)) + layer(
        "InnerProduct",
        "x",
        "a",
        "inner_product_param { num_output: 3 bias_filler { value: -1 } }",
        name="ip",
    )
    text += layer("Power", "a", "b", name="same") + layer("ReLU", "b", "b", name="cut")
    tops = build(text + layer("Eltwise", "a b", "y", name="join"))({"x": noise(2, 3)})
    assert torch.equal(tops["y"], torch.full((2, 3), -1.0))


@pytest.mark.parametrize(
    ("kind", "top", "body", "text"),
    [
        ("AbsVal", "x", "", "cannot run in place; name its top differently than 'x'"),
        ("Exp", "y", "exp_param { base: 0 }", "base is 0, expected a positive number, or -1 for e"),
        ("Exp", "y", "exp_param { base: inf }", "base is inf, expected a positive number"),
        ("Log", "y", "log_param { base: -2 }", "base is -2, expected a positive number"),
        ("Log", "y", "log_param { base: 1 }", "base is 1, expected a different positive number"),
    ],
)
def test_mistakes(kind: str, top: str, body: str, text: str) -> None:
    with pytest.raises(DefinitionError, match=text):
        build(inputs(x=(3,)) + layer(kind, "x", top, body))
