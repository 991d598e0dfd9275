"""SPP: its levels are poolings."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise


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


@pytest.mark.parametrize(
    ("shape", "body", "message"),
    [
        ((2, 3, 4, 4), "", "missing pyramid_height"),
        ((2, 3, 4), "pyramid_height: 1", "expected 4"),
        ((2, 3, 3, 3), "pyramid_height: 4", "pyramid level"),
    ],
)
def test_mistakes(shape: tuple[int, ...], body: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        spp(shape, body)
