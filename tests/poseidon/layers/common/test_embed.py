"""Embed is an InnerProduct of one-hot vectors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from poseidon.errors import DataError, DefinitionError
from poseidon.net.net import Net
from tests.support.nets import build, inputs, layer

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


def test_mistakes() -> None:
    with pytest.raises(DefinitionError, match="missing input_dim"):
        embed("num_output: 3")
    with pytest.raises(DataError, match=r"index 5 is outside 0..4"):
        embed("num_output: 4 input_dim: 5")({"x": torch.full((2, 3), 5.0)})
