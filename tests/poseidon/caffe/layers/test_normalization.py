"""LRN, MVN, Normalize against the plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from poseidon.caffe.layers.normalization import channel_window_sum
from tests.support.nets import build, inputs, layer, noise, stack


@pytest.mark.parametrize(
    ("size", "beta", "k"), [(1, 0.75, 1), (3, 0.5, 2), (5, 0.6, 1), (9, 0.75, 2)]
)
def test_across_channels_equals_torchs_own(size: int, beta: float, k: float) -> None:
    body = f"lrn_param {{ local_size: {size} alpha: 0.3 beta: {beta} k: {k} }}"
    net = build(inputs(x=(2, 6, 3, 4)) + layer("LRN", "x", "y", body))
    x = noise(2, 6, 3, 4)
    torch.testing.assert_close(
        net({"x": x})["y"], functional.local_response_norm(x, size, 0.3, beta, k)
    )


def test_within_a_channel_counts_zeros_beyond_the_border() -> None:
    body = "lrn_param { local_size: 3 alpha: 0.9 beta: 0.5 k: 7 norm_region: WITHIN_CHANNEL }"
    net = build(inputs(x=(1, 1, 3, 3)) + layer("LRN", "x", "y", body))
    y = net({"x": torch.ones(1, 1, 3, 3)})["y"][0, 0]
    neighbours = torch.tensor([[4.0, 6, 4], [6, 9, 6], [4, 6, 4]])
    # k is not read here, as in Caffe.
    torch.testing.assert_close(y, (1 + 0.9 / 9 * neighbours).rsqrt())


def test_window_sum_is_its_own_adjoint() -> None:
    x, g = noise(2, 7, 3, seed=1), noise(2, 7, 3, seed=2)
    for reach in (0, 1, 3, 9):
        torch.testing.assert_close(
            (channel_window_sum(x, reach) * g).sum(), (channel_window_sum(g, reach) * x).sum()
        )


@pytest.mark.parametrize(
    ("shape", "across"),
    [((2, 3, 4, 5), "true"), ((2, 3, 4), "false"), ((2, 3), "true"), ((4,), "false")],
)
@pytest.mark.parametrize("eps", [1e-9, 0.5])
def test_mvn(shape: tuple[int, ...], across: str, eps: float) -> None:
    body = f"mvn_param {{ across_channels: {across} eps: {eps} }}"
    net = build(inputs(x=shape) + layer("MVN", "x", "y", body))
    x = noise(*shape).view(shape + (1,) * (4 - len(shape)))
    axes = (1, 2, 3) if across == "true" else (2, 3)
    centred = x - x.mean(axes, keepdim=True)
    expected = centred / (x.var(axes, unbiased=False, keepdim=True).sqrt() + eps)
    torch.testing.assert_close(net({"x": noise(*shape)})["y"], expected)


def test_mvn_without_variance() -> None:
    net = build(stack("MVN x=2,3,4,5 > y | mvn_param { normalize_variance: false }"))
    x = noise(2, 3, 4, 5)
    torch.testing.assert_close(net({"x": x})["y"], x - x.mean((2, 3), keepdim=True))


def test_the_gradient_of_mvn_takes_eps_for_small() -> None:
    """So does Caffe: dx = (g - mean(g) - y mean(g y)) / (sqrt(v) + eps)."""
    net = build(inputs(x=(1, 1, 1, 9)) + layer("MVN", "x", "y", "mvn_param { eps: 0.5 }"))
    x, g = noise(1, 1, 1, 9).requires_grad_(), noise(1, 1, 1, 9, seed=1)
    y = net({"x": x})["y"]
    y.backward(g)
    d = x.detach().std(unbiased=False) + 0.5
    torch.testing.assert_close(x.grad, (g - g.mean() - y.detach() * (g * y.detach()).mean()) / d)


@pytest.mark.parametrize(("across", "axes"), [("true", (1, 2, 3)), ("false", (1,))])
@pytest.mark.parametrize("shared", ["true", "false"])
def test_normalize(across: str, axes: tuple[int, ...], shared: str) -> None:
    body = f"norm_param {{ across_spatial: {across} channel_shared: {shared} eps: 0.3 scale_filler {{ value: 20 }} }}"
    net = build(inputs(x=(2, 3, 4, 5)) + layer("Normalize", "x", "y", body))
    (scale,) = net.parameters()
    assert scale.shape == (() if shared == "true" else (3,))
    x = noise(2, 3, 4, 5)
    expected = 20 * x / (x.square().sum(axes, keepdim=True) + 0.3).sqrt()
    torch.testing.assert_close(net({"x": x})["y"], expected)


def test_normalize_by_default_scales_by_one_over_the_picture() -> None:
    net = build(inputs(x=(2, 3, 4)) + layer("Normalize", "x", "y"))
    x = noise(2, 3, 4)
    torch.testing.assert_close(net({"x": x})["y"].flatten(1), functional.normalize(x.flatten(1)))
