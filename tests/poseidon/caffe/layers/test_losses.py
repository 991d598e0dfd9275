"""Losses against labels, by the formulas of their docstrings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.blob import from_array
from poseidon.errors import DataError, DefinitionError
from tests.support.nets import build, inputs, layer, noise, stack

LABELS = torch.tensor([2.0, 0, 1, 1])


def one(kind: str, body: str = "", **shapes: tuple[int, ...]) -> Net:
    return build(inputs(**shapes) + layer(kind, " ".join(shapes), "loss", body))


def test_multinomial_and_its_threshold() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]], requires_grad=True)
    net = one("MultinomialLogisticLoss", x=(2, 3), l=(2,))
    loss = net({"x": p, "l": torch.tensor([2.0, 0])})["loss"]
    assert float(loss.detach()) == pytest.approx(-(np.log(0.5) + np.log(1e-20)) / 2, rel=1e-6)
    loss.backward()
    assert p.grad is not None
    assert p.grad.flatten().tolist() == pytest.approx([0, 0, -1, -0.5e20, 0, 0], rel=1e-6)


def test_multinomial_of_one_probability_an_item() -> None:
    net = one("MultinomialLogisticLoss", x=(2,), l=(2,))
    loss = net({"x": torch.tensor([0.5, 1]), "l": torch.zeros(2)})["loss"]
    assert float(loss) == pytest.approx(-np.log(0.5) / 2, rel=1e-6)


@pytest.mark.parametrize("from_file", [True, False])
def test_infogain(from_file: bool, tmp_path: Path) -> None:
    x, h = noise(2, 3, 2), noise(3, 3, seed=1)
    label = torch.tensor([[0.0, 1], [2, 1]])
    log_p = torch.log_softmax(x, 1)
    expected = sum(
        -(h[int(label[n, s])] * log_p[n, :, s]).sum()
        for n in range(2)
        for s in range(2)
        if label[n, s] != 1
    )
    body = "loss_param { ignore_label: 1 normalization: NONE }"
    if from_file:
        path = tmp_path / "h.binaryproto"
        path.write_bytes(from_array(h.numpy().reshape(1, 1, 3, 3)).SerializeToString())
        net = one(
            "InfogainLoss",
            f'{body} infogain_loss_param {{ source: "{path}" }}',
            x=(2, 3, 2),
            l=(2, 2),
        )
        loss = net({"x": x, "l": label})["loss"]
    else:
        net = one("InfogainLoss", body, x=(2, 3, 2), l=(2, 2), h=(3, 3))
        loss = net({"x": x, "l": label, "h": h})["loss"]
    torch.testing.assert_close(loss, torch.as_tensor(expected))


@pytest.mark.parametrize(
    ("body", "normalizer"),
    [
        ("", 4),
        ("normalization: FULL", 12),
        ("normalization: VALID", 12),
        ("normalization: NONE", 1),
        ("normalization: PRE_FIXED pre_fixed_normalizer: 6", 6),
        ("normalize: true", 12),
        ("normalize: false", 4),
        ("normalization: VALID ignore_label: 1", 8),
        ("normalization: FULL ignore_label: 1", 12),
    ],
)
def test_sigmoid_cross_entropy(body: str, normalizer: float) -> None:
    x, t = noise(4, 3), torch.tensor([[1.0, 0, 0]] * 4)
    p = torch.sigmoid(x)
    losses = -(t * p.log() + (1 - t) * (1 - p).log())
    if "ignore" in body:
        losses = losses * (t != 1)
    net = one("SigmoidCrossEntropyLoss", f"loss_param {{ {body} }}", x=(4, 3), t=(4, 3))
    torch.testing.assert_close(net({"x": x, "t": t})["loss"], losses.sum() / normalizer)


def test_sigmoid_cross_entropy_of_large_scores_is_finite() -> None:
    x = torch.tensor([[1000.0, -1000.0]])
    loss = one("SigmoidCrossEntropyLoss", x=(1, 2), t=(1, 2))(
        {"x": x, "t": torch.tensor([[1.0, 1]])}
    )["loss"]
    assert float(loss) == 1000


@pytest.mark.parametrize("kind", ["HingeLoss", "MultinomialLogisticLoss"])
def test_a_label_out_of_range(kind: str) -> None:
    with pytest.raises(DataError, match=r"label 3 is outside 0..2"):
        one(kind, x=(1, 3), l=(1,))({"x": torch.rand(1, 3), "l": torch.tensor([3.0])})


def test_a_matrix_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "h.binaryproto"
    path.write_bytes(from_array(np.zeros((2, 2))).SerializeToString())
    with pytest.raises(DefinitionError, match="has 4 values, expected 3 x 3"):
        one("InfogainLoss", f'infogain_loss_param {{ source: "{path}" }}', x=(4, 3), l=(4,))
    path.write_bytes(b"nonsense")
    with pytest.raises(DefinitionError, match="is not a binaryproto"):
        one("InfogainLoss", f'infogain_loss_param {{ source: "{path}" }}', x=(4, 3), l=(4,))


SCORES = torch.tensor([[3.0, 1, 2], [1, 1, 0], [0, 5, 9], [7, 7, 7]])


@pytest.mark.parametrize(
    ("labels", "body", "expected"),
    [
        ([0, 2, 2, 0], "", 0.5),
        ([2, 2, 1, 1], "", 0.0),
        # Row 1: 0 and 1 tie, and a tie counts against the label; row 3: all tie.
        ([0, 0, 2, 1], "", 0.5),
        ([2, 0, 1, 1], "top_k: 2", 0.75),
        ([1, 2, 0, 1], "top_k: 3", 1.0),
        ([0, 1, 2, 1], "ignore_label: 1", 1.0),
        ([1, 1, 1, 1], "ignore_label: 1", 0.0),
    ],
)
def test_share(labels: list[int], body: str, expected: float) -> None:
    net = build(stack(f"Accuracy x=4,3 l=4 > a | accuracy_param {{ {body} }}"))
    assert float(net({"x": SCORES, "l": torch.tensor(labels).float()})["a"]) == pytest.approx(
        expected
    )


def test_maps_and_axis() -> None:
    """Over maps it is the accuracy of their pixels."""
    maps = build(inputs(x=(2, 5, 3, 4), l=(2, 3, 4)) + layer("Accuracy", "x l", "a"))
    last = build(stack("Accuracy x=2,3,4,5 l=2,3,4 > a | accuracy_param { axis: 3 }"))
    x = noise(2, 5, 3, 4)
    label = torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(0)).float()
    expected = (x.argmax(1) == label).float().mean()
    assert float(maps({"x": x, "l": label})["a"]) == pytest.approx(float(expected))
    assert float(last({"x": x.movedim(1, 3).contiguous(), "l": label})["a"]) == pytest.approx(
        float(expected)
    )


def test_it_has_no_gradient() -> None:
    net = build(inputs(x=(4, 3), l=(4,)) + layer("Accuracy", "x l", "a"))
    assert not net({"x": SCORES.clone().requires_grad_(), "l": torch.zeros(4)})["a"].requires_grad


PAIRS = {"a": (4, 3), "b": (4, 3), "y": (4,)}
ALIKE = torch.tensor([1.0, 0, 0, 1])


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
