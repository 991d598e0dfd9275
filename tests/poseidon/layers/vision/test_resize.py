"""Interp."""

from __future__ import annotations

import pytest
import torch

from poseidon.errors import DefinitionError
from poseidon.net.net import Net
from tests.support.nets import build, inputs, layer


def interp(body: str) -> Net:
    return build(inputs(x=(1, 1, 5, 5)) + layer("Interp", "x", "y", f"interp_param {{ {body} }}"))


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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "has no size"),
        ("height: 3", "expected at least 1 for both"),
        ("zoom_factor: 0", "must be at least 1"),
        ("zoom_factor: 2 pad_beg: 1", "expected 0 or less"),
        ("zoom_factor: 2 pad_beg: -5", "crop all"),
    ],
)
def test_mistakes(body: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        interp(body)
