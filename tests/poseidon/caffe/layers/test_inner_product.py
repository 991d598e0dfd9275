"""InnerProduct and Embed: shapes and equivalences."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError, DefinitionError
from tests.support.nets import build, inputs, layer, noise

FILL = "weight_filler { type: 'xavier' } bias_filler { type: 'gaussian' }"


@pytest.mark.parametrize(
    ("shape", "body", "weight", "top"),
    [
        ((2, 6, 3, 4), "num_output: 7", (7, 72), (2, 7)),
        ((2, 6, 3, 4), "num_output: 7 axis: 2", (7, 12), (2, 6, 7)),
        ((2, 6, 3, 4), "num_output: 7 axis: -1", (7, 4), (2, 6, 3, 7)),
        ((2, 6, 3, 4), "num_output: 7 axis: 0", (7, 144), (7,)),
        ((2, 6), "num_output: 7 transpose: true bias_term: false", (6, 7), (2, 7)),
    ],
)
def test_shapes(
    shape: tuple[int, ...], body: str, weight: tuple[int, ...], top: tuple[int, ...]
) -> None:
    net = build(
        inputs(x=shape)
        + layer("InnerProduct", "x", "y", f"inner_product_param {{ {body} {FILL} }}")
    )
    assert net.parameters_info[0].shape == weight
    assert tuple(net({"x": noise(*shape)})["y"].shape) == top == net.blob_shapes["y"]


@pytest.mark.parametrize(
    ("extra", "offered"), [("", True), ("transpose: true", False), ("axis: 2", False)]
)
def test_factors_are_offered_where_the_gradient_is_their_product(extra: str, offered: bool) -> None:
    body = f"inner_product_param {{ num_output: 4 {extra} }}"
    net = build(inputs(x=(3, 5, 2)) + layer("InnerProduct", "x", "y", body))
    assert [info.factors for info in net.parameters_info] == [offered, False]


FILLERS = "weight_filler { type: 'gaussian' std: 1 } bias_filler { value: 2 }"


def embed(body: str) -> Net:
    return build(inputs(x=(2, 3)) + layer("Embed", "x", "y", f"embed_param {{ {body} }}"))


@pytest.mark.parametrize("bias", ["", "bias_term: false"])
def test_one_hot(bias: str) -> None:
    net = embed(f"num_output: 4 input_dim: 5 {bias} {FILLERS}")
    weight, *rest = net.layer_modules[-1][1].blobs()
    x = torch.tensor([[0.0, 4, 4], [1, 2, 0]])
    expected = functional.one_hot(x.long(), 5).float() @ weight + (rest[0] if rest else 0)
    y = net({"x": x})["y"]
    assert tuple(y.shape) == (2, 3, 4)
    torch.testing.assert_close(y, expected)


def test_few_rows_of_an_embed_have_a_gradient() -> None:
    net = embed(f"num_output: 4 input_dim: 5 {FILLERS}")
    assert [info.looked_up for info in net.parameters_info] == [True, False]


def test_embed_refuses_a_missing_size_and_an_index_outside() -> None:
    with pytest.raises(DefinitionError, match="missing input_dim"):
        embed("num_output: 3")
    with pytest.raises(DataError, match=r"index 5 is outside 0..4"):
        embed("num_output: 4 input_dim: 5")({"x": torch.full((2, 3), 5.0)})
