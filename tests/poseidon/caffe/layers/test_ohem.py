"""Hard example mining of R-FCN by hand, and a net that learns from the hardest regions."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from tests.support.nets import build, inputs, layer, noise


def one(kind: str, bottoms: str, tops: str, body: str = "", **shapes: tuple[int, ...]) -> Net:
    return build(inputs(**shapes) + layer(kind, bottoms, tops, body))


def test_smooth_l1_by_region() -> None:
    """d = (0.5, 2, 0, 3) and (0, 0, 0, 1): 0.125 + 1.5 + 2.5 and 0.5."""
    a = torch.tensor([[0.5, 2, 0, -3], [9, 0, 0, 1]]).requires_grad_()
    weights = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1]])
    net = one("SmoothL1LossOHEM", "a b w", "loss each", a=(2, 4), b=(2, 4), w=(2, 4))
    tops = net({"a": a, "b": torch.zeros(2, 4), "w": weights})
    assert tops["each"].shape == (2, 1, 1, 1) and not tops["each"].requires_grad
    assert tops["each"].flatten().tolist() == pytest.approx([4.125, 0.5])
    assert float(tops["loss"].detach()) == pytest.approx(4.625 / 2)
    tops["loss"].backward()
    assert a.grad is not None
    assert a.grad.tolist() == [pytest.approx([0.25, 0.5, 0, -0.5]), pytest.approx([0, 0, 0, 0.5])]


def test_the_gradient_has_no_further_weight() -> None:
    """w = 2, a - b = 0.25: d = 0.5 and the gradient is 0.5, not 1."""
    a = torch.tensor([[0.25]]).requires_grad_()
    net = one("SmoothL1LossOHEM", "a b w", "loss", a=(1, 1), b=(1, 1), w=(1, 1))
    loss = net({"a": a, "b": torch.zeros(1, 1), "w": torch.tensor([[2.0]])})["loss"]
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.125) and a.grad is not None
    assert float(a.grad) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("body", "divisor"),
    [
        ("", 12),
        ("normalization: FULL", 12),
        ("normalization: BATCH_SIZE", 2),
        ("normalize: false", 2),
        ("normalization: NONE", 1),
        ("normalization: PRE_FIXED pre_fixed_normalizer: 8", 8),
        ("normalization: PRE_FIXED pre_fixed_normalizer: 0.5", 1),
    ],
)
def test_divisors(body: str, divisor: float) -> None:
    shape = (2, 3, 2, 3)
    net = one("SmoothL1LossOHEM", "a b", "loss each", f"loss_param {{ {body} }}", a=shape, b=shape)
    tops = net({"a": noise(*shape), "b": noise(*shape, seed=1)})
    assert tops["each"].shape == (2, 1, 2, 3)
    torch.testing.assert_close(tops["loss"] * divisor, tops["each"].sum())


def test_softmax_loss_by_item() -> None:
    scores, labels = noise(4, 3), torch.tensor([0.0, 2, -1, 1])
    net = one(
        "SoftmaxWithLossOHEM",
        "x l",
        "loss p each",
        "loss_param { ignore_label: -1 }",
        x=(4, 3),
        l=(4,),
    )
    tops = net({"x": scores, "l": labels})
    expected = -torch.log_softmax(scores, 1)[range(4), [0, 2, 0, 1]]
    expected[2] = 0
    torch.testing.assert_close(tops["each"], expected)
    torch.testing.assert_close(tops["loss"], expected.sum() / 3)
    torch.testing.assert_close(tops["p"], torch.softmax(scores, 1))


def test_softmax_loss_of_a_fixed_divisor() -> None:
    text = "loss_param { normalization: PRE_FIXED pre_fixed_normalizer: 7 }"
    given = {"x": noise(4, 3), "l": torch.zeros(4)}
    fixed = one("SoftmaxWithLoss", "x l", "loss", text, x=(4, 3), l=(4,))(given)["loss"]
    plain = one(
        "SoftmaxWithLoss", "x l", "loss", "loss_param { normalization: NONE }", x=(4, 3), l=(4,)
    )
    torch.testing.assert_close(fixed * 7, plain(given)["loss"])


def test_the_hardest_regions_of_each_image_keep_their_labels() -> None:
    regions = torch.zeros(6, 5)
    regions[:, 0] = torch.tensor([0.0, 1, 0, 0, 1, 1])
    losses = torch.tensor([1.0, 9, 3, 2, 5, 7]).view(6, 1, 1, 1)
    labels, weights = torch.arange(1.0, 7), torch.ones(6, 8)
    body = "box_annotator_ohem_param { roi_per_img: 2 ignore_label: -9 }"
    net = one(
        "BoxAnnotatorOHEM", "r e l w", "a b", body, r=(6, 5), e=(6, 1, 1, 1), l=(6,), w=(6, 8)
    )
    tops = net({"r": regions, "e": losses, "l": labels, "w": weights})
    assert tops["a"].shape == (6, 1, 1, 1) and tops["b"].shape == (6, 8, 1, 1)
    assert tops["a"].flatten().tolist() == [-9, 2, 3, 4, -9, 6]
    assert tops["b"][:, 0].flatten().tolist() == [0, 1, 1, 1, 0, 1]
