"""Pooling against Caffe's loop, written out."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.layers.base import LayerError
from poseidon.caffe.layers.pooling import pooled_extents
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST
from tests.support.nets import build, inputs, layer, noise, stack


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
        net = build(stack(f"Pooling x=2,3,10,12 > y | pooling_param {{ pool: {kind} {body} }}"))
        assert (
            tuple(net({"x": noise(2, 3, 10, 12)})["y"].shape)
            == (2, 3, *expected)
            == net.blob_shapes["y"]
        )


def test_a_last_window_outside_the_input_is_refused() -> None:
    with pytest.raises(LayerError, match="last window entirely outside"):
        pooled_extents((4, 4), (1, 1), (2, 2), (0, 0), ceil=True)
    assert pooled_extents((4, 4), (1, 1), (2, 2), (0, 0), ceil=False) == (2, 2)


def test_a_window_wholly_outside_has_the_lowest_value_and_no_place() -> None:
    """Kernel 1, stride 2 on an even extent: Caffe counts one window too many."""
    net = build(stack("Pooling x=1,1,4,4 > y m | pooling_param { kernel_size: 1 stride: 2 }"))
    x = noise(1, 1, 4, 4).requires_grad_()
    tops = net({"x": x})
    y, mask = tops["y"].detach(), tops["m"]
    assert tuple(y.shape) == (1, 1, 3, 3) == net.blob_shapes["y"]
    assert torch.equal(y[:, :, :2, :2], x.detach()[:, :, ::2, ::2])
    assert (y[:, :, 2] == torch.finfo(torch.float32).min).all() and (mask[:, :, 2] == -1).all()
    tops["y"].sum().backward()
    assert x.grad is not None and float(x.grad.sum()) == 4


STOCHASTIC = "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"


def test_stochastic_draws_in_proportion() -> None:
    x = torch.tensor([[1.0, 3], [0, 4]]).expand(1, 2000, 2, 2).contiguous().requires_grad_()
    net = build(inputs(x=(1, 2000, 2, 2)) + layer("Pooling", "x", "y", STOCHASTIC))
    y = net({"x": x})["y"]
    counts = [float((y.detach() == value).float().mean()) for value in (0, 1, 3, 4)]
    assert counts == pytest.approx([0, 1 / 8, 3 / 8, 4 / 8], abs=0.04)
    y.sum().backward()
    # The gradient goes to the value that was drawn.
    assert x.grad is not None and float((x.grad * x.detach()).sum()) == float(y.detach().sum())


def test_stochastic_in_test_is_the_mean_of_what_would_be_drawn() -> None:
    x = noise(2, 3, 5, 5).abs()
    net = build(inputs(x=(2, 3, 5, 5)) + layer("Pooling", "x", "y", STOCHASTIC), phase=TEST)
    y = net({"x": x})["y"]
    window = x[0, 0, 2:4, 4:5]
    assert tuple(y.shape) == (2, 3, 3, 3)
    torch.testing.assert_close(y[0, 0, 1, 2], window.square().sum() / window.sum())


@pytest.mark.parametrize(
    ("body", "extents"),
    [
        ("", (3, 4)),
        ("ceil_mode: true", (3, 4)),
        ("ceil_mode: false", (2, 3)),
        ("round_mode: FLOOR", (2, 3)),
        ("round_mode: FLOOR ceil_mode: false", (2, 3)),
    ],
)
def test_ceil_mode_is_round_mode_in_other_branches(body: str, extents: tuple[int, int]) -> None:
    pooling = f"pooling_param {{ kernel_size: 2 stride: 2 {body} }}"
    net = build(inputs(x=(1, 1, 5, 7)) + layer("Pooling", "x", "y", pooling))
    assert net.blob_shapes["y"] == (1, 1, *extents)


def spp(shape: tuple[int, ...], body: str) -> Net:
    return build(inputs(x=shape) + layer("SPP", "x", "y", f"spp_param {{ {body} }}"))


@pytest.mark.parametrize("extents", [(8, 8), (7, 11), (9, 12)])
@pytest.mark.parametrize("pool", ["MAX", "AVE"])
def test_the_first_level_is_global_and_all_are_side_by_side(
    extents: tuple[int, int], pool: str
) -> None:
    shape = (2, 3, *extents)
    net = spp(shape, f"pyramid_height: 3 pool: {pool}")
    x = noise(*shape)
    y = net({"x": x})["y"]
    assert tuple(y.shape) == (2, 3 * (1 + 4 + 16)) == net.blob_shapes["y"]
    whole = x.amax((2, 3)) if pool == "MAX" else x.mean((2, 3))
    torch.testing.assert_close(y[:, :3], whole)
    if pool == "MAX":
        torch.testing.assert_close(y[:, 3:15].view(2, 3, 4).amax(2), whole)


def test_one_level_keeps_its_axes() -> None:
    net = spp((2, 3, 4, 4), "pyramid_height: 1")
    assert net.blob_shapes["y"] == (2, 3, 1, 1) == tuple(net({"x": noise(2, 3, 4, 4)})["y"].shape)
