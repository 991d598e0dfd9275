"""Split, Concat, Slice, Eltwise."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from tests.support.nets import build, inputs, layer, noise, stack


def test_old_fields_of_concat_and_slice() -> None:
    text = inputs(x=(2, 3), y=(4, 3)) + layer(
        "Concat", "x y", "z", "concat_param { concat_dim: 0 }", name="join"
    )
    text += layer("Slice", "z", "a b", "slice_param { slice_dim: 0 slice_point: 1 }", name="cut")
    net, x, y = build(text), noise(2, 3), noise(4, 3)
    assert {name: net.blob_shapes[name] for name in "zab"} == {
        "z": (6, 3),
        "a": (1, 3),
        "b": (5, 3),
    }
    tops = net({"x": x, "y": y})
    assert torch.equal(tops["a"], x[:1]) and torch.equal(tops["b"], torch.cat((x[1:], y)))


def test_the_gradient_of_a_tie_goes_where_caffe_sends_it() -> None:
    """To bottom 1 rather than 0, and to neither of the later ones."""
    text = stack("Eltwise a=1 b=1 c=1 > y | eltwise_param { operation: MAX }")
    given = {name: torch.ones(1, requires_grad=True) for name in "abc"}
    build(text)(given)["y"].backward()
    assert [0.0 if value.grad is None else float(value.grad) for value in given.values()] == [
        0,
        1,
        0,
    ]


def one(kind: str, body: str, shape: tuple[int, ...]) -> Net:
    return build(inputs(x=shape) + layer(kind, "x", "y", body))


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


def test_argmax_of_one_value_an_item() -> None:
    y = one("ArgMax", "argmax_param { out_max_val: true }", (2,))({"x": torch.tensor([5.0, 7])})
    assert y["y"].tolist() == [[[0], [5]], [[0], [7]]]


def test_argmax_of_pictures_keeps_four_axes() -> None:
    net = one("ArgMax", "argmax_param { out_max_val: true top_k: 2 }", (2, 3, 2, 2))
    x = noise(2, 3, 2, 2)
    y = net({"x": x})["y"]
    assert tuple(y.shape) == (2, 2, 2, 1) == net.blob_shapes["y"]
    torch.testing.assert_close(y[:, 1, :, 0], x.flatten(1).topk(2).values)
