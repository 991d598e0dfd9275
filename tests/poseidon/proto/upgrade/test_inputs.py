"""Inputs of a net become its first layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.errors import DefinitionError
from poseidon.proto.caffe_pb2 import NetParameter
from poseidon.proto.definition import read_net
from poseidon.proto.text import parse
from poseidon.proto.upgrade.driver import upgrade_net
from poseidon.proto.upgrade.errors import UpgradeError

CASES = [
    (
        'name: "n" input: "data" input_dim: [1, 3, 4, 5] layer { name: "x" }',
        'name: "n" layer { name: "input" type: "Input" top: "data" '
        "input_param { shape { dim: [1, 3, 4, 5] } } } layer { name: \"x\" }",
    ),
    (
        'input: "a" input: "b" input_shape { dim: 2 } input_shape { dim: [3, 4] }',
        'layer { name: "input" type: "Input" top: ["a", "b"] input_param { shape { dim: 2 } shape { dim: [3, 4] } } }',
    ),
    (
        'input: "a" input: "b" input_dim: [1, 2, 3, 4, 5, 6, 7, 8]',
        'layer { name: "input" type: "Input" top: ["a", "b"] '
        "input_param { shape { dim: [1, 2, 3, 4] } shape { dim: [5, 6, 7, 8] } } }",
    ),
    ('input: "a" layer { }', "layer { }"),
    (
        'input: "a" input_dim: [1, 1, 1, 1] layers { type: RELU }',
        'layer { name: "input" type: "Input" top: "a" input_param { shape { dim: [1, 1, 1, 1] } } } layer { type: "ReLU" }',
    ),
]  # fmt: skip

BROKEN = [
    ('input: "a" input_dim: [1, 2, 3]', "3 input_dim given for 1 inputs; expected 4 for each"),
    ('input: "a" input: "b" input_shape { }', "1 input_shape given for 2 inputs; expected one for each"),
    ('input: "a" input_shape { } input_dim: [1, 1, 1, 1]', "both input_shape and input_dim"),
]


@pytest.mark.parametrize("old, new", CASES)
def test_inputs_become_a_layer(old: str, new: str) -> None:
    assert upgrade_net(parse(old, NetParameter(), source="")) == parse(new, NetParameter(), source="")


@pytest.mark.parametrize("text, message", BROKEN)
def test_shapes_that_do_not_go_with_the_inputs_are_refused(text: str, message: str) -> None:
    with pytest.raises(UpgradeError, match=message):
        upgrade_net(parse(text, NetParameter(), source=""))


def test_the_new_layer_has_the_line_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "deploy.prototxt"
    path.write_text('name: "n"\ninput: "data"\ninput_dim: [1, 1, 1, 1]\nlayer { name: "x" }\n')
    assert read_net(path).layer_lines == (2, 4)
    path.write_text('name: "n"\ninput: "data"\ninput_dim: 1\n')
    with pytest.raises(DefinitionError, match=r"deploy.prototxt: 1 input_dim given for 1 inputs"):
        read_net(path)
