"""Pooling against Caffe's loop, written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from poseidon.layers.base import LayerError
from poseidon.layers.pooling import pooled_extents
from tests.support.nets import build, inputs, layer, noise


def caffe(
    x: torch.Tensor, kind: str, kernel: int, stride: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and mask, window by window, as src/caffe/layers/pooling_layer.cpp computes them."""
    high, wide = x.shape[2:]
    counts = []
    for size in (high, wide):
        count = math.ceil((size + 2 * pad - kernel) / stride) + 1
        counts.append(count - 1 if pad and (count - 1) * stride >= size + pad else count)
    top = torch.zeros(*x.shape[:2], *counts)
    mask = torch.zeros_like(top)
    for row, column in itertools.product(*map(range, counts)):
        top_edge, left = row * stride - pad, column * stride - pad
        bottom_edge, right = min(top_edge + kernel, high + pad), min(left + kernel, wide + pad)
        size = (bottom_edge - top_edge) * (right - left)
        y0, x0 = max(top_edge, 0), max(left, 0)
        patch = x[:, :, y0 : min(bottom_edge, high), x0 : min(right, wide)]
        flat = patch.flatten(2)
        if kind == "AVE":
            top[:, :, row, column] = flat.sum(2) / size
        else:
            best = flat.argmax(2)
            top[:, :, row, column] = flat.amax(2)
            mask[:, :, row, column] = (
                (y0 + best // patch.shape[3]) * wide + x0 + best % patch.shape[3]
            ).float()
    return top, mask


WINDOWS = [
    (size, kernel, stride, pad)
    for size, kernel, stride, pad in itertools.product(((5, 6), (7, 4)), (2, 3), (1, 2, 3), (0, 1, 2))
    if pad < kernel and not (stride > kernel and not pad)
]


@pytest.mark.parametrize("kind", ["MAX", "AVE"])
@pytest.mark.parametrize(("size", "kernel", "stride", "pad"), WINDOWS)
def test_every_window(size: tuple[int, int], kernel: int, stride: int, pad: int, kind: str) -> None:
    x = noise(2, 3, *size)
    tops = "y mask" if kind == "MAX" else "y"
    body = f"pooling_param {{ pool: {kind} kernel_size: {kernel} stride: {stride} pad: {pad} }}"
    net = build(inputs(x=(2, 3, *size)) + layer("Pooling", "x", tops, body))
    found = net({"x": x})
    top, mask = caffe(x, kind, kernel, stride, pad)
    assert net.blob_shapes["y"] == tuple(top.shape)
    torch.testing.assert_close(found["y"], top)
    if kind == "MAX":
        torch.testing.assert_close(found["mask"], mask)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("kernel_size: 3 stride: 2", (5, 6)),
        ("kernel_size: 3 stride: 2 round_mode: FLOOR", (4, 5)),
        ("kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 2 pad_h: 0 pad_w: 1", (9, 7)),
        ("global_pooling: true", (1, 1)),
    ],
)
def test_shapes(body: str, expected: tuple[int, int]) -> None:
    for kind in ("MAX", "AVE"):
        net = build(
            inputs(x=(2, 3, 10, 12)) + layer("Pooling", "x", "y", f"pooling_param {{ pool: {kind} {body} }}")
        )
        assert tuple(net({"x": noise(2, 3, 10, 12)})["y"].shape) == (2, 3, *expected) == net.blob_shapes["y"]


def test_global_pooling_is_the_mean_and_the_maximum() -> None:
    x = noise(2, 3, 4, 5)
    for kind, expected in (("AVE", x.mean((2, 3))), ("MAX", x.amax((2, 3)))):
        body = f"pooling_param {{ pool: {kind} global_pooling: true }}"
        net = build(inputs(x=(2, 3, 4, 5)) + layer("Pooling", "x", "y", body))
        torch.testing.assert_close(net({"x": x})["y"].flatten(1), expected)


def test_a_last_window_outside_the_input_is_refused() -> None:
    with pytest.raises(LayerError, match="last window wholly outside"):
        pooled_extents((4, 4), (1, 1), (2, 2), (0, 0), ceil=True)
    assert pooled_extents((4, 4), (1, 1), (2, 2), (0, 0), ceil=False) == (2, 2)
