"""Flatten and Reshape."""

from __future__ import annotations

import pytest
import torch

from tests.support.nets import build, inputs, layer, noise

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
