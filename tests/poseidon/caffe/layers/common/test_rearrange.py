"""BatchReindex, Crop, Filter, Tile, ShuffleChannel against indexing by hand."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError, DefinitionError
from tests.support.nets import build, inputs, layer, noise


def one(kind: str, body: str = "", **shapes: tuple[int, ...]) -> Net:
    return build(inputs(**shapes) + layer(kind, " ".join(shapes), "y", body))


def test_batch_reindex_repeats_and_reorders() -> None:
    x = noise(3, 2, 2).requires_grad_()
    net = one("BatchReindex", x=(3, 2, 2), p=(4,))
    y = net({"x": x, "p": torch.tensor([2.0, 0, 2, 2])})["y"]
    assert torch.equal(y, x[[2, 0, 2, 2]])
    y.sum().backward()
    assert x.grad is not None and x.grad[:, 0, 0].tolist() == [1, 0, 3]


@pytest.mark.parametrize("index", [3.0, -1.0])
def test_an_index_outside_the_batch(index: float) -> None:
    with pytest.raises(DataError, match=r"layer.*index (3|-1) is outside 0..2"):
        one("BatchReindex", x=(3, 2), p=(1,))({"x": noise(3, 2), "p": torch.tensor([index])})


def test_filter_and_the_layers_above_it() -> None:
    text = inputs(x=(4, 3), z=(4, 2), s=(4, 1)) + layer("Filter", "x z s", "a b", name="filter")
    net = build(text + layer("Reduction", "a", "sum", "reduction_param { axis: 1 }", name="sum"))
    x, z = noise(4, 3), noise(4, 2)
    for selector in ([1.0, 0, 0, 2], [1.0, 1, 1, 1], [0.0, 0, 1, 0]):
        chosen = [place for place, value in enumerate(selector) if value]
        tops = net({"x": x, "z": z, "s": torch.tensor(selector).view(4, 1)})
        assert torch.equal(tops["b"], z[chosen])
        torch.testing.assert_close(tops["sum"], x[chosen].sum(1))


def test_filter_of_nothing_is_empty() -> None:
    text = inputs(x=(3, 2), s=(3,)) + layer("Filter", "x s", "a", name="filter")
    net = build(
        text + layer("InnerProduct", "a", "y", "inner_product_param { num_output: 4 }", name="ip")
    )
    assert tuple(net({"x": noise(3, 2), "s": torch.zeros(3)})["y"].shape) == (0, 4)


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        ("", (slice(0, 2), slice(0, 3), slice(0, 2), slice(0, 3))),
        ("axis: 1 offset: 1", (slice(0, 2), slice(1, 2), slice(1, 3), slice(1, 4))),
        ("axis: -2 offset: 2 offset: 3", (slice(0, 2), slice(0, 3), slice(2, 4), slice(3, 6))),
    ],
)
def test_crop(body: str, cut: tuple[slice, ...]) -> None:
    like = (2, 1, 2, 3) if "axis: 1" in body else (2, 3, 2, 3)
    x = noise(2, 3, 4, 6)
    y = one("Crop", f"crop_param {{ {body} }}", x=(2, 3, 4, 6), z=like)(
        {"x": x, "z": noise(*like)}
    )["y"]
    assert torch.equal(y, x[cut])


def test_tile() -> None:
    x = noise(2, 3)
    y = one("Tile", "tile_param { axis: -1 tiles: 2 }", x=(2, 3))({"x": x})["y"]
    assert torch.equal(y, torch.cat((x, x), 1))


def test_shuffled_channels_are_dealt_out() -> None:
    x = torch.arange(6.0).view(1, 6)
    y = one("ShuffleChannel", "shuffle_channel_param { group: 2 }", x=(1, 6))({"x": x})["y"]
    assert y.tolist() == [[0, 3, 1, 4, 2, 5]]


@pytest.mark.parametrize(
    ("kind", "shapes", "body", "message"),
    [
        (
            "BatchReindex",
            {"x": (3, 2), "p": (2, 2)},
            "",
            "bottom 1 has shape 2x2, expected one axis",
        ),
        ("Filter", {"x": (3, 2), "s": (3, 2)}, "", "selector has shape 3x2"),
        ("Filter", {"x": (4, 2), "s": (3,)}, "", "bottom 'x' has shape 4x2, expected 3 items"),
        ("Crop", {"x": (2, 3, 4), "z": (2, 3)}, "", "expected as many axes"),
        ("Crop", {"x": (2, 3, 4), "z": (2, 3, 4)}, "crop_param { offset: 1 }", "exceed axis 2"),
        (
            "Crop",
            {"x": (2, 3, 4), "z": (2, 3, 4)},
            "crop_param { offset: 0 offset: 0 }",
            "offset occurs 2 times",
        ),
        ("Tile", {"x": (2, 3)}, "", "missing tiles"),
        ("Tile", {"x": (2, 3)}, "tile_param { tiles: 0 }", "tiles is 0"),
        (
            "ShuffleChannel",
            {"x": (2, 3)},
            "shuffle_channel_param { group: 2 }",
            "divisor of the 3 channels",
        ),
    ],
)
def test_mistakes(kind: str, shapes: dict[str, tuple[int, ...]], body: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        one(kind, body, **shapes)


SHAPE = (2, 6, 4, 5)


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("Flatten", "", (2, 120)),
        ("Flatten", "flatten_param { axis: 2 }", (2, 6, 20)),
        ("Flatten", "flatten_param { axis: 1 end_axis: -2 }", (2, 24, 5)),
        ("Flatten", "flatten_param { axis: 0 end_axis: 1 }", (12, 4, 5)),
        ("Reshape", "reshape_param { shape { dim: 0 dim: -1 } }", (2, 120)),
        ("Reshape", "reshape_param { shape { dim: 0 dim: 3 dim: -1 } }", (2, 3, 40)),
        (
            "Reshape",
            "reshape_param { shape { dim: 2 dim: -1 } axis: 1 num_axes: 2 }",
            (2, 2, 12, 5),
        ),
        ("Reshape", "reshape_param { shape { dim: 1 } axis: -1 num_axes: 0 }", (2, 6, 4, 5, 1)),
        ("Reshape", "reshape_param { shape { dim: 1 } axis: 1 num_axes: 0 }", (2, 1, 6, 4, 5)),
        ("Reshape", "reshape_param { }", ()),
    ],
)
def test_shapes(kind: str, body: str, expected: tuple[int, ...]) -> None:
    shape = (1, 1) if not expected else SHAPE
    net = build(inputs(x=shape) + layer(kind, "x", "y", body))
    x = noise(*shape)
    y = net({"x": x})["y"]
    assert tuple(y.shape) == expected == net.blob_shapes["y"]
    assert torch.equal(y.flatten(), x.flatten())
