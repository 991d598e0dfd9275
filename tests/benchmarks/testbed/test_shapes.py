"""The nets' shapes: as many parameters as the literature says, and none lost on the way to a
worker.
"""

from __future__ import annotations

import math

import pytest

from benchmarks.testbed.shapes import default_rows, from_json, layers_of, to_json
from poseidon.observe.plan.shapes import elements, shares_of_work

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
