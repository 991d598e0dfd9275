"""Input, DummyData and Silence."""

from __future__ import annotations

import pytest
import torch

from poseidon.errors import DefinitionError, UsageError
from tests.support.nets import build, inputs, layer, noise


def test_dummy_constants_and_shapes() -> None:
    body = "dummy_data_param { data_filler { value: 2 } shape { dim: 2 dim: 3 } shape { dim: 4 } }"
    tops = build(layer("DummyData", "", "a b", body))()
    assert torch.equal(tops["a"], torch.full((2, 3), 2.0)) and torch.equal(
        tops["b"], torch.full((4,), 2.0)
    )


def test_dummy_old_shape() -> None:
    body = "dummy_data_param { num: 2 num: 3 channels: 4 height: 5 width: 6 }"
    net = build(layer("DummyData", "", "a b", body))
    assert (net.blob_shapes["a"], net.blob_shapes["b"]) == ((2, 4, 5, 6), (3, 4, 5, 6))


def test_dummy_noise_is_new_in_each_pass_and_the_same_in_each_run() -> None:
    text = layer(
        "DummyData",
        "",
        "a",
        "dummy_data_param { data_filler { type: 'gaussian' } shape { dim: 5 } }",
    )
    one, two = build(text), build(text)
    first, second = one()["a"], one()["a"]
    assert not torch.equal(first, second)
    assert torch.equal(two()["a"], first)
    assert not torch.equal(build(text, rank=1)()["a"], first)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "input 'x' is missing, expected a tensor of shape 2x3"),
        ({"x": noise(2, 4)}, "input 'x' has shape 2x4, expected 2x3"),
        ({"x": noise(2, 3), "z": noise(1)}, "unknown input 'z'"),
    ],
)
def test_inputs_are_checked(given: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(inputs(x=(2, 3)) + layer("ReLU", "x", "y"))(given)


def test_a_smaller_batch_is_welcome() -> None:
    net = build(inputs(x=(4, 3)) + layer("ReLU", "x", "y"))
    assert tuple(net({"x": noise(2, 3)})["y"].shape) == (2, 3)


def test_silence_takes_blobs_off_the_outputs() -> None:
    net = build(inputs(x=(4, 3), z=(2,)) + layer("Silence", "z", ""))
    assert list(net({"x": noise(4, 3), "z": noise(2)})) == ["x"]


def test_a_constant_that_no_blob_can_hold_is_refused_before_it_is_made() -> None:
    body = "dummy_data_param { shape { dim: 100000 dim: 1000000 } }"
    with pytest.raises(DefinitionError, match="top 1 would be 100000x1000000 = 100000000000"):
        build(layer("DummyData", "", "a", body))
