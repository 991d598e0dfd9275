"""Fields that have changed: transformation settings, inputs, BatchNorm's `param` blocks,
solver_type.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.text import parse
from poseidon.caffe.proto.upgrade.driver import needs_upgrade, upgrade_net, upgrade_solver
from poseidon.caffe.proto.upgrade.errors import UpgradeError
from poseidon.errors import DefinitionError

TRANSFORMATIONS = [
    (
        'layer { data_param { source: "s" scale: 0.5 mean_file: "m" crop_size: 3 mirror: true } }',
        'layer { data_param { source: "s" } transform_param { scale: 0.5 mean_file: "m" '
        "crop_size: 3 mirror: true } }",
    ),
    (
        "layers { type: IMAGE_DATA image_data_param { new_height: 9 mirror: false } }",
        'layer { type: "ImageData" image_data_param { new_height: 9 } transform_param { mirror: '
        "false } }",
    ),
    (
        "layers { type: WINDOW_DATA window_data_param { crop_size: 7 } transform_param { "
        "crop_size: 7 scale: 2 } }",
        'layer { type: "WindowData" window_data_param { } transform_param { crop_size: 7 scale: 2 '
        "} }",
    ),
    ('layer { data_param { source: "s" } }', 'layer { data_param { source: "s" } }'),
    ("layer { power_param { scale: 2 } }", "layer { power_param { scale: 2 } }"),
]


@pytest.mark.parametrize("old, new", TRANSFORMATIONS)
def test_settings_move(old: str, new: str) -> None:
    assert upgrade_net(parse(old, NetParameter(), source="")) == parse(
        new, NetParameter(), source=""
    )


def test_contradicting_transformations_are_refused() -> None:
    net = parse(
        "layer { } layer { data_param { mirror: true } transform_param { mirror: false } }",
        NetParameter(),
        source="",
    )
    with pytest.raises(
        UpgradeError,
        match="mirror is set in transform_param and, with a different value, in data_param",
    ) as caught:
        upgrade_net(net)
    assert caught.value.layer == 1


INPUTS = [
    (
        'name: "n" input: "data" input_dim: [1, 3, 4, 5] layer { name: "x" }',
        'name: "n" layer { name: "input" type: "Input" top: "data" '
        "input_param { shape { dim: [1, 3, 4, 5] } } } layer { name: \"x\" }",
    ),
    (
        'input: "a" input: "b" input_shape { dim: 2 } input_shape { dim: [3, 4] }',
        'layer { name: "input" type: "Input" top: ["a", "b"] input_param { shape { dim: 2 } shape '
'{ dim: [3, 4] } } }',
    ),
    (
        'input: "a" input: "b" input_dim: [1, 2, 3, 4, 5, 6, 7, 8]',
        'layer { name: "input" type: "Input" top: ["a", "b"] '
        "input_param { shape { dim: [1, 2, 3, 4] } shape { dim: [5, 6, 7, 8] } } }",
    ),
    ('input: "a" layer { }', "layer { }"),
    (
        'input: "a" input_dim: [1, 1, 1, 1] layers { type: RELU }',
        'layer { name: "input" type: "Input" top: "a" input_param { shape { dim: [1, 1, 1, 1] } } '
'} layer { type: "ReLU" }',
    ),
]  # fmt: skip

BROKEN_INPUTS = [
    ('input: "a" input_dim: [1, 2, 3]', "3 input_dim given for 1 inputs; expected 4 for each"),
    (
        'input: "a" input: "b" input_shape { }',
        "1 input_shape given for 2 inputs; expected one for each",
    ),
    ('input: "a" input_shape { } input_dim: [1, 1, 1, 1]', "both input_shape and input_dim"),
]


@pytest.mark.parametrize("old, new", INPUTS)
def test_inputs_become_a_layer(old: str, new: str) -> None:
    assert upgrade_net(parse(old, NetParameter(), source="")) == parse(
        new, NetParameter(), source=""
    )


@pytest.mark.parametrize("text, message", BROKEN_INPUTS)
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


ZERO = "param { lr_mult: 0 decay_mult: 0 } "


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("param { lr_mult: 1 } param { } param { lr_mult: 0 }", ZERO * 3),
        (
            'param { name: "m" } param { } param { }',
            f'param {{ name: "m" lr_mult: 0 decay_mult: 0 }} {ZERO * 2}',
        ),
        (ZERO * 3, None),
        ("param { lr_mult: 0 }", None),
        ("", None),
    ],
)
def test_statistics_are_left_alone(before: str, after: str | None) -> None:
    old = parse(f'layer {{ type: "BatchNorm" {before} }}', NetParameter(), source="")
    assert needs_upgrade(old) is (after is not None)
    new = (
        old
        if after is None
        else parse(f'layer {{ type: "BatchNorm" {after} }}', NetParameter(), source="")
    )
    assert upgrade_net(old) == new


def test_other_layers_keep_their_multipliers() -> None:
    net = parse('layer { type: "Scale" param { } param { } param { } }', NetParameter(), source="")
    assert upgrade_net(net) == net


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "SGD"),
        ("solver_type: SGD", "SGD"),
        ("solver_type: NESTEROV", "Nesterov"),
        ("solver_type: ADAGRAD", "AdaGrad"),
        ("solver_type: RMSPROP", "RMSProp"),
        ("solver_type: ADADELTA", "AdaDelta"),
        ("solver_type: ADAM", "Adam"),
        ("solver_type: 5", "Adam"),
        ('type: "Nesterov"', "Nesterov"),
    ],
)
def test_solver_type(text: str, expected: str) -> None:
    upgraded = upgrade_solver(parse(text, SolverParameter(), source=""))
    assert upgraded.type == expected
    assert not upgraded.HasField("solver_type")


def test_both_solver_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text('solver_type: ADAM\ntype: "SGD"')
    with pytest.raises(DefinitionError, match="solver_type and type are both set"):
        read_solver(path)
