"""Activations: in place or not, the numbers are the same."""

from __future__ import annotations

import pytest
import torch

from tests.support.nets import build, inputs, layer, noise

CASES = [
    ("ReLU", ""),
    ("ReLU", "relu_param { negative_slope: 0.1 }"),
    ("Sigmoid", ""),
    ("TanH", ""),
    ("ELU", ""),
    ("ELU", "elu_param { alpha: -0.3 }"),
    ("SeLu", ""),
    ("PReLU", ""),
    ("Swish", "swish_param { beta: 2 }"),
    ("BNLL", ""),
    ("Clip", "clip_param { min: -0.5 max: 0.2 }"),
    ("Power", "power_param { scale: -2 shift: 1 }"),
    ("Power", "power_param { power: 2 shift: 1 }"),
    ("Exp", "exp_param { base: 2 shift: 1 }"),
    ("Bias", ""),
    ("Scale", "scale_param { bias_term: true }"),
    ("BatchNorm", ""),
]


@pytest.mark.parametrize(("kind", "body"), CASES)
def test_in_place_equals_beside(kind: str, body: str) -> None:
    body_of_first = "inner_product_param { num_output: 6 weight_filler { type: 'xavier' } }"
    first = layer("InnerProduct", "x", "a", body_of_first, name="ip")
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


def test_selu() -> None:
    """With the default numbers it is torch's."""
    x = noise(4, 5)
    net = build(inputs(x=(4, 5)) + layer("SeLu", "x", "y"))
    torch.testing.assert_close(net({"x": x})["y"], torch.nn.functional.selu(x))
    net = build(inputs(x=(4, 5)) + layer("SeLu", "x", "y", "selu_param { lambda: 2 alpha: 0.5 }"))
    torch.testing.assert_close(net({"x": x})["y"], torch.where(x > 0, 2 * x, x.exp() - 1))


def test_relu_on_a_source_leaves_the_callers_tensor_alone() -> None:
    net = build(inputs(x=(3,)) + layer("ReLU", "x", "x"))
    x = torch.tensor([-2.0, 0.0, 2.0])
    assert net({"x": x})["x"].tolist() == [0, 0, 2]
    assert x.tolist() == [-2, 0, 2]


def test_clip_passes_the_gradient_from_edge_to_edge() -> None:
    net = build(inputs(x=(5,)) + layer("Clip", "x", "y", "clip_param { min: -1 max: 2 }"))
    x = torch.tensor([-1.5, -1, 0, 2, 2.5]).requires_grad_()
    y = net({"x": x})["y"]
    y.sum().backward()
    assert y.tolist() == [-1, -1, 0, 2, 2]
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1, 1, 0]


def test_clip_of_crossed_limits_is_the_lower() -> None:
    net = build(inputs(x=(3,)) + layer("Clip", "x", "y", "clip_param { min: 2 max: -1 }"))
    assert net({"x": torch.tensor([-3.0, 0, 3])})["y"].tolist() == [2, 2, 2]


def test_threshold_is_strict_and_has_no_gradient() -> None:
    net = build(inputs(x=(3,)) + layer("Threshold", "x", "y", "threshold_param { threshold: 0.5 }"))
    y = net({"x": torch.tensor([0.4, 0.5, 0.6]).requires_grad_()})["y"]
    assert y.tolist() == [0, 0, 1] and not y.requires_grad


def test_bnll_does_not_overflow() -> None:
    net = build(inputs(x=(3,)) + layer("BNLL", "x", "y"))
    x = torch.tensor([-200.0, 0, 200]).requires_grad_()
    y = net({"x": x})["y"]
    y.sum().backward()
    torch.testing.assert_close(y.detach(), torch.tensor([0, 0.6931472, 200]))
    assert x.grad is not None and x.grad.tolist() == [0, 0.5, 1]


def test_prelu_has_a_slope_a_channel_or_one() -> None:
    for body, shape in (("", (3,)), ("prelu_param { channel_shared: true }", ())):
        net = build(inputs(x=(1, 3, 2, 2, 2)) + layer("PReLU", "x", "y", body))
        (slope,) = net.parameters()
        assert slope.shape == shape and float(slope.detach().mean()) == 0.25
        with torch.no_grad():
            slope.copy_(torch.arange(3.0) if shape else torch.tensor(7.0))
        y = net({"x": torch.full((1, 3, 2, 2, 2), -2.0)})["y"]
        assert y[0, :, 0, 0, 0].tolist() == ([0, -2, -4] if shape else [-14] * 3)
