"""Interp, Upsample and Reorg."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError, DefinitionError
from tests.support.gradient_check import check_gradients
from tests.support.nets import build, inputs, layer, noise, stack


def interp(body: str) -> Net:
    return build(inputs(x=(1, 1, 5, 5)) + layer("Interp", "x", "y", f"interp_param {{ {body} }}"))


def test_the_size_of_another_blob() -> None:
    """It comes before the other fields, as in the branches, and follows the second bottom."""
    like = layer(
        "Interp", "x z", "y", "interp_param { use_blob_size: true zoom_factor: 2 pad_beg: -1 }"
    )
    net = build(inputs(x=(1, 1, 5, 5), z=(2, 3, 4, 7)) + like)
    x = RAMP.clone()
    expected = torch.linspace(1, 4, 7)
    torch.testing.assert_close(net({"x": x, "z": noise(2, 3, 4, 7)})["y"][0, 0, 0], expected)
    net.reshape({"z": (2, 3, 2, 4)})
    found = net({"x": x, "z": noise(2, 3, 2, 4)})["y"]
    torch.testing.assert_close(found, torch.tensor([1.0, 2, 3, 4]).expand(1, 1, 2, 4))


@pytest.mark.parametrize(
    ("bottoms", "body", "found"),
    [
        ("x", "use_blob_size: true", "1 bottom and use_blob_size: true"),
        ("x z", "height: 2 width: 2", "2 bottoms and"),
    ],
)
def test_a_second_bottom_and_use_blob_size_need_each_other(
    bottoms: str, body: str, found: str
) -> None:
    text = inputs(x=(1, 1, 5, 5), z=(1, 1, 4, 7)) + layer(
        "Interp", bottoms, "y", f"interp_param {{ {body} }}"
    )
    with pytest.raises(
        DefinitionError, match=f"has {found}.*expected a second bottom with use_blob_size: true"
    ):
        build(text)


RAMP = torch.arange(5.0).view(1, 1, 1, 5).expand(1, 1, 5, 5).contiguous()


@pytest.mark.parametrize(
    ("body", "extent", "last"),
    [
        ("height: 9 width: 9", 9, 4),
        ("zoom_factor: 2", 9, 4),
        ("shrink_factor: 2", 3, 4),
        ("shrink_factor: 2 zoom_factor: 3", 7, 4),
        ("zoom_factor: 3 pad_end: -1", 10, 3),
    ],
)
def test_a_ramp_stays_a_ramp(body: str, extent: int, last: float) -> None:
    net = interp(body)
    y = net({"x": RAMP})["y"]
    assert tuple(y.shape) == (1, 1, extent, extent) == net.blob_shapes["y"]
    torch.testing.assert_close(y[0, 0, 0], torch.linspace(0, last, extent))


def test_a_map_returns_to_the_places_of_its_maxima() -> None:
    """SegNet: pool with a mask, upsample, and only the maxima are left."""
    net = build(
        inputs(x=(1, 1, 3, 4))
        + layer("Pooling", "x", "p m", "pooling_param { kernel_size: 2 stride: 2 }", name="pool")
        + layer("Upsample", "p m", "y", "upsample_param { scale: 2 pad_out_h: true }", name="up")
    )
    x = torch.tensor([[1.0, 5, 2, 3], [4, 0, 9, 1], [7, 6, 8, 8]]).view(1, 1, 3, 4).requires_grad_()
    y = net({"x": x})["y"]
    expected = torch.tensor([[0.0, 5, 0, 0], [0, 0, 9, 0], [7, 0, 8, 0]]).view(1, 1, 3, 4)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, (expected > 0).float())


def test_the_gradient_of_upsample() -> None:
    shapes = {"x": (2, 3, 5, 4)}
    net = build(
        inputs(**shapes)
        + layer("Pooling", "x", "p m", "pooling_param { kernel_size: 2 stride: 2 }", name="pool")
        + layer("Upsample", "p m", "y", "upsample_param { upsample_h: 5 upsample_w: 4 }", name="up")
    )
    net.double()
    x = noise(2, 3, 5, 4).double().requires_grad_()
    check_gradients(lambda: [net({"x": x})["y"]], [x])


@pytest.mark.parametrize(
    ("body", "extents"),
    [
        ("", (4, 6)),
        ("scale: 3", (6, 9)),
        ("scale_h: 2 scale_w: 4", (4, 12)),
        ("pad_out_w: true", (4, 5)),
        ("upsample_h: 5 upsample_w: 7", (5, 7)),
    ],
)
def test_extents_of_upsample(body: str, extents: tuple[int, int]) -> None:
    shapes = {"x": (1, 2, 2, 3), "m": (1, 2, 2, 3)}
    net = build(inputs(**shapes) + layer("Upsample", "x m", "y", f"upsample_param {{ {body} }}"))
    assert net.blob_shapes["y"] == (1, 2, *extents)


def test_indices_of_upsample() -> None:
    shapes = {"x": (1, 1, 1, 3), "m": (1, 1, 1, 3)}
    net = build(
        inputs(**shapes)
        + layer("Upsample", "x m", "y", "upsample_param { upsample_h: 2 upsample_w: 2 }")
    )
    x = torch.tensor([1.0, 2, 3]).view(1, 1, 1, 3)
    found = net({"x": x, "m": torch.tensor([3.0, -1, 0]).view(1, 1, 1, 3)})["y"]
    assert found.flatten().tolist() == [3, 0, 0, 1]  # an empty window's index is left out
    for wrong in (4.0, -2.0):
        with pytest.raises(DataError, match=f"index {wrong:g} is outside the 2x2 top"):
            net({"x": x, "m": torch.tensor([0.0, 1, wrong]).view(1, 1, 1, 3)})


def test_reorg_in_darknets_order() -> None:
    """Darknet's loop, for 4 channels of 2 x 4: out[k, j, i] is the memory read as 1 x 4 x 8, at
    row 2j + k/2, column 2i + k%2.
    """
    net = build(inputs(x=(1, 4, 2, 4)) + layer("Reorg", "x", "y", "reorg_param { stride: 2 }"))
    y = net({"x": torch.arange(32.0).view(1, 4, 2, 4)})["y"]
    assert tuple(y.shape) == (1, 16, 1, 2)
    expected = [
        8 * (2 * j + k // 2) + 2 * i + k % 2 for k in range(4) for j in range(2) for i in range(4)
    ]
    assert y.flatten().tolist() == expected


def test_reorg_in_reverse() -> None:
    net = build(stack("Reorg x=1,4,1,2 > y | reorg_param { stride: 2 reverse: true }"))
    y = net({"x": torch.arange(8.0).view(1, 4, 1, 2)})["y"]
    assert y[0, 0].tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]


def test_one_bottom_fills_squares() -> None:
    """Yolo's layer."""
    net = build(inputs(x=(1, 1, 1, 2)) + layer("Upsample", "x", "y", "upsample_param { scale: 2 }"))
    x = torch.tensor([1.0, 2]).view(1, 1, 1, 2).requires_grad_()
    y = net({"x": x})["y"]
    assert y[0, 0].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]
    y.sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [4, 4]
    with pytest.raises(DefinitionError, match="has 1 bottom, expected scale: <at least 1> alone"):
        build(stack("Upsample x=1,1,1,2 > y | upsample_param { scale: 2 pad_out_h: true }"))
