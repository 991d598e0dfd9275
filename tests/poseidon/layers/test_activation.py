"""Activations: in place or not, the numbers are the same."""

from __future__ import annotations

import pytest
import torch

from tests.support.nets import build, inputs, layer, noise

CASES = [("ReLU", ""), ("ReLU", "relu_param { negative_slope: 0.1 }"), ("Sigmoid", ""), ("TanH", "")]


@pytest.mark.parametrize(("kind", "body"), CASES)
def test_in_place_equals_beside(kind: str, body: str) -> None:
    first = layer(
        "InnerProduct",
        "x",
        "a",
        "inner_product_param { num_output: 6 weight_filler { type: 'xavier' } }",
        name="ip",
    )
    gradients, tops = [], []
    for top in ("a", "b"):
        net = build(inputs(x=(4, 5)) + first + layer(kind, "a", top, body))
        x = noise(4, 5).requires_grad_()
        found = net({"x": x})[top]
        found.square().sum().backward()
        gradients.append(x.grad)
        tops.append(found)
    assert torch.equal(tops[0], tops[1])
    assert torch.equal(gradients[0], gradients[1])


def test_relu_has_the_slope_at_zero_of_the_negative_side() -> None:
    for body, slope in (("", 0.0), ("relu_param { negative_slope: 0.25 }", 0.25)):
        net = build(inputs(x=(3,)) + layer("ReLU", "x", "y", body))
        x = torch.tensor([-2.0, 0.0, 2.0], requires_grad=True)
        y = net({"x": x})["y"]
        y.sum().backward()
        assert y.tolist() == [-2 * slope, 0, 2]
        assert x.grad is not None and x.grad.tolist() == [slope, slope, 1]


def test_relu_on_a_source_leaves_the_callers_tensor_alone() -> None:
    net = build(inputs(x=(3,)) + layer("ReLU", "x", "x"))
    x = torch.tensor([-2.0, 0.0, 2.0])
    assert net({"x": x})["x"].tolist() == [0, 0, 2]
    assert x.tolist() == [-2, 0, 2]
