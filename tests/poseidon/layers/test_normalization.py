"""LRN: both regions against the plain formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from poseidon.layers.normalization import channel_window_sum
from tests.support.nets import build, inputs, layer, noise


@pytest.mark.parametrize("size", [1, 3, 5, 9])
@pytest.mark.parametrize("beta", [0.75, 0.5, 0.6])
@pytest.mark.parametrize("k", [1, 2])
def test_across_channels_equals_torchs_own(size: int, beta: float, k: float) -> None:
    body = f"lrn_param {{ local_size: {size} alpha: 0.3 beta: {beta} k: {k} }}"
    net = build(inputs(x=(2, 6, 3, 4)) + layer("LRN", "x", "y", body))
    x = noise(2, 6, 3, 4)
    torch.testing.assert_close(net({"x": x})["y"], functional.local_response_norm(x, size, 0.3, beta, k))


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
