"""Split, Concat, Slice, Eltwise."""

from __future__ import annotations

import pytest
import torch

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
