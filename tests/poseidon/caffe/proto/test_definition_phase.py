"""Caffe's include and exclude rules (test_net.cpp's FilterNet cases, as a table)."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter, NetState, NetStateRule
from poseidon.caffe.proto.definition import NetDefinition, filter_net, is_included, meets
from poseidon.caffe.proto.text import layer_lines, parse
from poseidon.errors import DefinitionError

TRAIN, TEST = "phase: TRAIN", "phase: TEST"

RULES = [
    # state, rule, met
    ("", "", True),
    (TRAIN, "", True),
    (TRAIN, TRAIN, True),
    (TRAIN, TEST, False),
    ("", TEST, True),  # a state's phase is TEST when it is not set
    ("", TRAIN, False),
    ("level: 2", "min_level: 2", True),
    ("level: 1", "min_level: 2", False),
    ("level: 2", "max_level: 2", True),
    ("level: 3", "max_level: 2", False),
    ("", "min_level: 0 max_level: 0", True),
    ("level: -1", "min_level: 0", False),
    ("level: -1", "max_level: -1", True),
    ("stage: 'a'", "stage: 'a'", True),
    ("", "stage: 'a'", False),
    ("stage: 'a'", "stage: 'a' stage: 'b'", False),
    ("stage: 'a' stage: 'b' stage: 'c'", "stage: 'a' stage: 'b'", True),
    ("stage: 'a'", "not_stage: 'a'", False),
    ("stage: 'a'", "not_stage: 'b'", True),
    ("stage: 'a' stage: 'b'", "stage: 'a' not_stage: 'b'", False),
    (TRAIN + " level: 1 stage: 'a'", TRAIN + " min_level: 1 stage: 'a' not_stage: 'b'", True),
    (TRAIN + " level: 1 stage: 'a'", TEST + " min_level: 1 stage: 'a' not_stage: 'b'", False),
]

LAYERS = [
    # layer's rules, state, in the net
    ("", TRAIN, True),
    ("include { phase: TRAIN }", TRAIN, True),
    ("include { phase: TRAIN }", TEST, False),
    ("exclude { phase: TRAIN }", TRAIN, False),
    ("exclude { phase: TRAIN }", TEST, True),
    ("include { phase: TEST } include { stage: 'a' }", TRAIN + " stage: 'a'", True),
    ("include { phase: TEST } include { stage: 'a' }", TRAIN, False),
    ("exclude { phase: TEST } exclude { stage: 'a' }", TRAIN + " stage: 'a'", False),
    ("exclude { phase: TEST } exclude { stage: 'a' }", TRAIN, True),
    ("include { }", TRAIN, True),
    ("exclude { }", TRAIN, False),
]


@pytest.mark.parametrize("state, rule, met", RULES)
def test_meets(state: str, rule: str, met: bool) -> None:
    assert meets(parse(state, NetState(), source=""), parse(rule, NetStateRule(), source="")) is met


@pytest.mark.parametrize("rules, state, included", LAYERS)
def test_is_included(rules: str, state: str, included: bool) -> None:
    layer = parse(rules, LayerParameter(), source="")
    assert is_included(layer, parse(state, NetState(), source="")) is included


def definition(text: str) -> NetDefinition:
    return NetDefinition(
        param=parse(text, NetParameter(), source="net"),
        source="net",
        layer_lines=tuple(layer_lines(text)),
        folder=Path("."),
    )


def test_filter_keeps_order_and_lines_and_the_given_definition() -> None:
    given = definition(
        "name: 'n'\n"
        "layer { name: 'a' include { phase: TEST } }\n"
        "layer { name: 'b' }\n"
        "layer { name: 'c' exclude { phase: TRAIN } }\n"
        "layer { name: 'd' }\n"
    )
    before = given.param.SerializeToString()
    kept = filter_net(given, NetState(phase=0))
    assert [layer.name for layer in kept.param.layer] == ["b", "d"]
    assert kept.layer_lines == (3, 5)
    assert kept.param.name == "n"
    assert given.param.SerializeToString() == before


def test_both_kinds_of_rules_in_one_layer_are_an_error_with_its_line() -> None:
    given = definition("layer { }\nlayer { name: 'x' type: 'ReLU' include { } exclude { } }")
    with pytest.raises(DefinitionError) as caught:
        filter_net(given, NetState())
    assert str(caught.value) == (
        "net:2: layer 'x' (ReLU): has both include and exclude rules; expected rules of one kind"
    )
