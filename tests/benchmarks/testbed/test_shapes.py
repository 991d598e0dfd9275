"""The nets' shapes: as many parameters as the literature says, and none lost on the way to a
worker.
"""

from __future__ import annotations

import math

import pytest

from benchmarks.testbed.shapes import default_rows, divided, from_json, layers_of, to_json
from poseidon.observe.plan.shapes import LayerShape, elements, shares_of_work

PARAMETERS = {
    "alexnet": 60_965_224,
    "dlrm": 54_294_273,
    "googlenet": 6_998_552,
    "gpt2": 124_439_808,
    "resnet50": 25_557_096,
    "vgg19": 143_667_240,
}


@pytest.mark.parametrize(("net", "parameters"), PARAMETERS.items())
def test_nets_have_their_parameters(net: str, parameters: int) -> None:
    layers = layers_of(net)
    assert elements(layers) == parameters
    assert from_json(to_json(layers)) == layers
    assert sum(shares_of_work(layers)) == pytest.approx(1.0)


def test_alexnet_ends_in_three_fully_connected_layers() -> None:
    kinds = [
        (layer.name, layer.tensors[0]) for layer in layers_of("alexnet") if layer.fully_connected
    ]
    assert kinds == [("fc6", (4096, 9216)), ("fc7", (4096, 4096)), ("fc8", (1000, 4096))]


def test_resnet_has_convolutions_only() -> None:
    layers = layers_of("resnet50")
    assert not any(layer.fully_connected for layer in layers)
    assert layers[-1].tensors == ((1000, 2048, 1, 1), (1000,))
    # the scale and shift of its batch normalization
    assert layers[1].tensors[1:] == ((256,), (256,))


def test_gpt2s_head_has_the_tensor_of_its_embedding() -> None:
    layers = layers_of("gpt2")
    assert (layers[0].name, layers[0].tensors) == ("wte", ((50257, 768),))
    assert (layers[-1].name, layers[-1].tensors) == ("head", ())
    assert layers[-1].work > 50 * layers[0].work
    assert [layer.name for layer in layers].count("wte") == 1


def test_a_quarter_of_gpt2_has_a_quarter_of_its_bytes_and_of_its_factors() -> None:
    whole, part = layers_of("gpt2"), layers_of("gpt2/4")
    assert elements(part) * 4 == pytest.approx(elements(whole), rel=0.01)
    assert default_rows("gpt2/4") * 2 == default_rows("gpt2")


def test_dlrm_is_mostly_tables() -> None:
    tables = [layer for layer in layers_of("dlrm") if layer.name.startswith("table")]
    assert len(tables) == 26
    assert elements(tables) > 0.98 * elements(layers_of("dlrm"))
    assert not any(layer.fully_connected for layer in tables)


def test_vgg19_22k_has_the_papers_size() -> None:
    assert elements(layers_of("vgg19-22k")) == pytest.approx(229e6, rel=0.001)


def test_a_fortieth_keeps_what_the_plan_depends_on() -> None:
    whole, part = layers_of("vgg19-22k"), layers_of("vgg19-22k/40")
    assert elements(part) * 40 == pytest.approx(elements(whole), rel=0.01)
    assert shares_of_work(part) == shares_of_work(whole)
    rows, fewer_rows = 32, 32 / math.sqrt(40)
    for big, small in zip(whole, part, strict=True):
        if big.fully_connected:
            assert fewer_rows * sum(small.tensors[0]) * 40 == pytest.approx(
                rows * sum(big.tensors[0]), rel=0.01
            )


def test_dividing_keeps_kernels_and_the_channels_of_a_picture() -> None:
    (layer,) = divided([LayerShape(name="conv1", tensors=((64, 3, 7, 7), (64,)), work=9)], by=4)
    assert layer.tensors == ((32, 3, 7, 7), (32,))
    assert layer.work == 9
