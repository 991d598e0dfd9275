"""EuclideanLoss and ContrastiveLoss by their formulas."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise

PAIRS = {"a": (4, 3), "b": (4, 3), "y": (4,)}
ALIKE = torch.tensor([1.0, 0, 0, 1])


def one(kind: str, body: str = "", **shapes: tuple[int, ...]) -> Net:
    return build(inputs(**shapes) + layer(kind, " ".join(shapes), "loss", body))


def test_euclidean() -> None:
    a, b = noise(2, 3), noise(2, 3, seed=1)
    loss = one("EuclideanLoss", a=(2, 3), b=(2, 3))({"a": a, "b": b})["loss"]
    torch.testing.assert_close(loss, (a - b).square().sum() / 4)


@pytest.mark.parametrize("legacy", [False, True])
def test_contrastive(legacy: bool) -> None:
    a, b = noise(4, 3), noise(4, 3, seed=1)
    distance = (a - b).norm(dim=1)
    far = (3 - distance**2).clamp(min=0) if legacy else (3 - distance).clamp(min=0) ** 2
    expected = torch.where(ALIKE == 1, distance**2, far).sum() / 8
    body = f"contrastive_loss_param {{ margin: 3 legacy_version: {str(legacy).lower()} }}"
    loss = one("ContrastiveLoss", body, **PAIRS)({"a": a, "b": b, "y": ALIKE})["loss"]
    torch.testing.assert_close(loss, expected)


def test_the_gradient_of_pairs_that_are_not_alike_is_caffes() -> None:
    """-(margin - d) / (d + 1e-4) (a - b) / N while the margin is not reached; nothing at a
    distance of 0.
    """
    a, b = noise(4, 3).requires_grad_(), noise(4, 3, seed=1)
    with torch.no_grad():
        a[1] = b[1]
    net = one("ContrastiveLoss", "contrastive_loss_param { margin: 2.5 }", **PAIRS)
    net({"a": a, "b": b, "y": torch.zeros(4)})["loss"].backward()
    difference = a.detach() - b
    distance = difference.norm(dim=1, keepdim=True)
    expected = -(2.5 - distance).clamp(min=0) / (distance + 1e-4) * difference / 4
    assert a.grad is not None and not a.grad[1].any()
    torch.testing.assert_close(a.grad, expected)


@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_smooth_l1(sigma: float) -> None:
    shapes = {"a": (4, 3), "b": (4, 3), "w": (4, 3), "v": (4, 3)}
    given = {name: noise(4, 3, seed=seed) for seed, name in enumerate(shapes)}
    d = given["w"] * (given["a"] - given["b"])
    near = d.abs() < 1 / sigma**2
    f = torch.where(near, (sigma * d) ** 2 / 2, d.abs() - 0.5 / sigma**2)
    loss = one("SmoothL1Loss", f"smooth_l1_loss_param {{ sigma: {sigma} }}", **shapes)(given)[
        "loss"
    ]
    torch.testing.assert_close(loss, (given["v"] * f).sum() / 4)


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_smooth_l1_with_three_bottoms_is_that_of_fast_rcnns_caffe(sigma: float) -> None:
    """d = w (a - b) and loss = sum of f(d) / N; the gradient at a is f'(d) / N, without a
    further w.
    """
    a, b = noise(4, 3).requires_grad_(), noise(4, 3, seed=1).requires_grad_()
    weights = torch.tensor([[0.0, 1, 3]] * 4)
    net = one(
        "SmoothL1Loss", f"smooth_l1_loss_param {{ sigma: {sigma} }}", a=(4, 3), b=(4, 3), w=(4, 3)
    )
    loss = net({"a": a, "b": b, "w": weights})["loss"]
    d = (weights * (a - b)).detach()
    near = d.abs() < 1 / sigma**2
    expected = torch.where(near, (sigma * d) ** 2 / 2, d.abs() - 0.5 / sigma**2).sum() / 4
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    slope = torch.where(near, sigma**2 * d, d.sign()) / 4
    torch.testing.assert_close(a.grad, slope)
    torch.testing.assert_close(b.grad, -slope)


@pytest.mark.parametrize(
    ("kind", "shapes", "message"),
    [
        (
            "EuclideanLoss",
            {"a": (2, 3), "b": (2, 2)},
            "expected the same number of values per item",
        ),
        ("SmoothL1Loss", {"a": (2, 3), "b": (2, 2)}, "expected equal shapes"),
        ("ContrastiveLoss", {"a": (2, 3), "b": (2, 2), "y": (2,)}, "expected NxC"),
        ("ContrastiveLoss", {"a": (2, 3, 2, 1), "b": (2, 3, 2, 1), "y": (2,)}, "expected NxC"),
        ("ContrastiveLoss", {"a": (2, 3), "b": (2, 3), "y": (3,)}, "expected 2 values: one a pair"),
    ],
)
def test_mistakes(kind: str, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        one(kind, **shapes)
