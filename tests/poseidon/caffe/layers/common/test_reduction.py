"""Reduction and ArgMax against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise


def one(kind: str, body: str, shape: tuple[int, ...]) -> Net:
    return build(inputs(x=shape) + layer(kind, "x", "y", body))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize(
    ("operation", "of"),
    [
        ("SUM", lambda x: x.sum(-1)),
        ("ASUM", lambda x: np.abs(x).sum(-1)),
        ("SUMSQ", lambda x: (x * x).sum(-1)),
        ("MEAN", lambda x: x.mean(-1)),
    ],
)
def test_reduction(axis: int, operation: str, of: object) -> None:
    x = noise(2, 3, 4)
    net = one(
        "Reduction",
        f"reduction_param {{ operation: {operation} axis: {axis} coeff: -2 }}",
        (2, 3, 4),
    )
    lead = x.shape[: axis % 3]
    expected = -2 * of(x.numpy().reshape(*lead, -1))  # type: ignore[operator]
    y = net({"x": x})["y"]
    assert tuple(y.shape) == tuple(lead) == net.blob_shapes["y"]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-6)


TIES = torch.tensor([[1.0, 5, 5, 2], [3, 3, 3, 3]])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", [[[2]], [[3]]]),
        ("top_k: 2", [[[2, 1]], [[3, 2]]]),
        ("out_max_val: true top_k: 2", [[[2, 1], [5, 5]], [[3, 2], [3, 3]]]),
        ("axis: 1 top_k: 3", [[2, 1, 3], [3, 2, 1]]),
        ("axis: 1 out_max_val: true", [[5], [3]]),
        ("axis: 0", [[1, 0, 0, 1]]),
    ],
)
def test_argmax_and_its_ties(body: str, expected: list[object]) -> None:
    net = one("ArgMax", f"argmax_param {{ {body} }}", (2, 4))
    y = net({"x": TIES})["y"]
    assert y.tolist() == expected
    assert tuple(y.shape) == net.blob_shapes["y"]


def test_argmax_of_pictures_keeps_four_axes() -> None:
    net = one("ArgMax", "argmax_param { out_max_val: true top_k: 2 }", (2, 3, 2, 2))
    x = noise(2, 3, 2, 2)
    y = net({"x": x})["y"]
    assert tuple(y.shape) == (2, 2, 2, 1) == net.blob_shapes["y"]
    torch.testing.assert_close(y[:, 1, :, 0], x.flatten(1).topk(2).values)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("Reduction", "reduction_param { axis: 3 }", "axis 3 is outside"),
        ("ArgMax", "argmax_param { top_k: 13 }", "top_k is 13, expected 1 to 12"),
        ("ArgMax", "argmax_param { axis: 1 top_k: 4 }", "top_k is 4, expected 1 to 3"),
        ("ArgMax", "argmax_param { top_k: 0 }", "top_k is 0"),
    ],
)
def test_mistakes(kind: str, body: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        one(kind, body, (2, 3, 4))
