"""Split, Concat, Slice, Eltwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_slice_undoes_concat(axis: int) -> None:
    text = inputs(x=(4, 4, 4), y=(4, 4, 4))
    text += layer("Concat", "x y", "z", f"concat_param {{ axis: {axis} }}", name="join")
    text += layer("Slice", "z", "a b", f"slice_param {{ axis: {axis} }}", name="cut")
    net = build(text)
    x, y = noise(4, 4, 4, seed=1), noise(4, 4, 4, seed=2)
    tops = net({"x": x, "y": y})
    assert torch.equal(tops["a"], x) and torch.equal(tops["b"], y)


def test_old_fields_of_concat_and_slice() -> None:
    text = inputs(x=(2, 3), y=(4, 3)) + layer(
        "Concat", "x y", "z", "concat_param { concat_dim: 0 }", name="join"
    )
    text += layer("Slice", "z", "a b", "slice_param { slice_dim: 0 slice_point: 1 }", name="cut")
    assert {name: build(text).blob_shapes[name] for name in "zab"} == {
        "z": (6, 3),
        "a": (1, 3),
        "b": (5, 3),
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", lambda a, b, c: a + b + c),
        ("coeff: 1 coeff: -0.5 coeff: 2", lambda a, b, c: a - 0.5 * b + 2 * c),
        ("operation: PROD", lambda a, b, c: a * b * c),
        ("operation: MAX", lambda a, b, c: a.maximum(b).maximum(c)),
        ("operation: MAX coeff: 1 coeff: 2 coeff: 3", lambda a, b, c: a.maximum(b).maximum(c)),
    ],
)
def test_eltwise(body: str, expected: object) -> None:
    text = inputs(a=(2, 3), b=(2, 3), c=(2, 3)) + layer(
        "Eltwise", "a b c", "y", f"eltwise_param {{ {body} }}"
    )
    blobs = [noise(2, 3, seed=seed) for seed in range(3)]
    found = build(text)(dict(zip("abc", blobs, strict=True)))["y"]
    torch.testing.assert_close(found, expected(*blobs))  # type: ignore[operator]


def test_the_gradient_of_a_tie_goes_where_caffe_sends_it() -> None:
    """To bottom 1 rather than 0, and to neither of the later ones."""
    text = inputs(a=(1,), b=(1,), c=(1,)) + layer(
        "Eltwise", "a b c", "y", "eltwise_param { operation: MAX }"
    )
    given = {name: torch.ones(1, requires_grad=True) for name in "abc"}
    build(text)(given)["y"].backward()
    assert [0.0 if value.grad is None else float(value.grad) for value in given.values()] == [
        0,
        1,
        0,
    ]


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
