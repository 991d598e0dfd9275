"""Accuracy: ties, top k, ignored labels, classes."""

from __future__ import annotations

import pytest
import torch

from tests.support.nets import build, inputs, layer, noise

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
    net = build(
        inputs(x=(4, 3), l=(4,)) + layer("Accuracy", "x l", "a", f"accuracy_param {{ {body} }}")
    )
    assert float(net({"x": SCORES, "l": torch.tensor(labels).float()})["a"]) == pytest.approx(
        expected
    )


def test_per_class() -> None:
    net = build(inputs(x=(4, 3), l=(4,)) + layer("Accuracy", "x l", "a per"))
    tops = net({"x": SCORES, "l": torch.tensor([0.0, 0, 2, 2])})
    assert tops["per"].tolist() == [0.5, 0, 0.5]


def test_maps_and_axis() -> None:
    """Over maps it is the accuracy of their pixels."""
    maps = build(inputs(x=(2, 5, 3, 4), l=(2, 3, 4)) + layer("Accuracy", "x l", "a"))
    last = build(
        inputs(x=(2, 3, 4, 5), l=(2, 3, 4))
        + layer("Accuracy", "x l", "a", "accuracy_param { axis: 3 }")
    )
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
