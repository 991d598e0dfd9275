"""AbsVal, Power, Exp, Log: the formulas, the constants that Caffe singles out, and mistakes."""

from __future__ import annotations

import math

import pytest
import torch

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
    body = "inner_product_param { num_output: 3 bias_filler { value: -1 } }"
    text = inputs(x=(2, 3)) + layer("InnerProduct", "x", "a", body, name="ip")
    text += layer("Power", "a", "b", name="same") + layer("ReLU", "b", "b", name="cut")
    tops = build(text + layer("Eltwise", "a b", "y", name="join"))({"x": noise(2, 3)})
    assert torch.equal(tops["y"], torch.full((2, 3), -1.0))


SHAPE = (2, 3, 4, 5)

# fields -> shape of the operand, and that shape as torch repeats it
FITS = [
    ("", (3,), (3, 1, 1)),
    ("axis: 0", (2,), (2, 1, 1, 1)),
    ("axis: 0 num_axes: 2", (2, 3), (2, 3, 1, 1)),
    ("axis: 1 num_axes: 2", (3, 4), (3, 4, 1)),
    ("axis: -1", (5,), (5,)),
    ("axis: 2 num_axes: -1", (4, 5), (4, 5)),
    ("axis: 0 num_axes: -1", SHAPE, SHAPE),
    ("num_axes: 0", (), ()),
    ("axis: 3 num_axes: 0", (), ()),
]


def operand(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Noise, of a scalar too."""
    return noise(*shape, 1, seed=seed).view(shape)


@pytest.mark.parametrize(("fields", "blob", "repeated"), FITS)
@pytest.mark.parametrize("given", [False, True])
def test_scale(fields: str, blob: tuple[int, ...], repeated: tuple[int, ...], given: bool) -> None:
    """A second bottom says the number of axes itself."""
    body = f"scale_param {{ {fields} bias_term: true filler {{ value: 5 }} bias_filler {{ value: 7 }} }}"
    text = inputs(x=SHAPE, s=blob) if given else inputs(x=SHAPE)
    net = build(text + layer("Scale", "x s" if given else "x", "y", body))
    parameters = list(net.parameters())
    assert [p.shape for p in parameters] == [blob] * (1 if given else 2)
    assert [float(p.detach().mean()) for p in parameters] == ([7] if given else [5, 7])
    s, b = operand(blob, 1), operand(blob, 2)
    with torch.no_grad():
        for parameter, value in zip(reversed(parameters), (b, s), strict=False):
            parameter.copy_(value)
    x = noise(*SHAPE)
    found = net({"x": x, "s": s} if given else {"x": x})["y"]
    torch.testing.assert_close(found, x * s.view(repeated) + b.view(repeated))


def test_scale_is_one_and_bias_zero_by_default() -> None:
    net = build(inputs(x=SHAPE) + layer("Scale", "x", "y", "scale_param { bias_term: true }"))
    assert torch.equal(net({"x": noise(*SHAPE)})["y"], noise(*SHAPE))


def test_a_smaller_last_batch_passes() -> None:
    text = inputs(x=(4, 3), s=(4,))
    net = build(text + layer("Scale", "x s", "y", "scale_param { axis: 0 }"))
    assert torch.equal(
        net({"x": torch.ones(2, 3), "s": torch.tensor([1.0, 2])})["y"][:, 0], torch.tensor([1.0, 2])
    )


@pytest.mark.parametrize("a", [(2, 3), (2, 3, 1, 1)])
def test_axpy(a: tuple[int, ...]) -> None:
    net = build(inputs(a=a, x=SHAPE, z=SHAPE) + layer("Axpy", "a x z", "y"))
    given = {"a": noise(*a), "x": noise(*SHAPE, seed=1), "z": noise(*SHAPE, seed=2)}
    expected = given["a"].view(2, 3, 1, 1) * given["x"] + given["z"]
    torch.testing.assert_close(net(given)["y"], expected)
