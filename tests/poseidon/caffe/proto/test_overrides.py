"""Fields of a solver that the command line sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.proto.overrides import changes, override
from poseidon.caffe.proto.text import parse, to_text
from poseidon.errors import DefinitionError

FILE = """net: "a.prototxt" base_lr: 0.1 max_iter: 4000 test_iter: 5 test_iter: 6
stepvalue: 1 stepvalue: 2 train_state { level: 1 stage: "x" } type: "SGD" """


def solver() -> SolverParameter:
    return parse(FILE, SolverParameter(), source="file")


@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        (["max_iter=20"], "max_iter: 20"),
        ([" base_lr = 1e-3 "], "base_lr: 0.001"),
        (["max_iter=1", "max_iter=2"], "max_iter: 2"),
        (["solver_mode=CPU"], "solver_mode: CPU"),
        (["snapshot_prefix=some folder/it's"], 'snapshot_prefix: "some folder/it\\\'s"'),
        (['snapshot_prefix="quoted"'], 'snapshot_prefix: "quoted"'),
        (["snapshot_prefix=über"], 'snapshot_prefix: "über"'),
        (["stepvalue=7"], "stepvalue: 7"),
        (["stepvalue=7", "stepvalue=8"], "stepvalue: 7 stepvalue: 8"),
        (["stepvalue=[7, 8]"], "stepvalue: 7 stepvalue: 8"),
        (["train_state.level=2"], 'train_state { level: 2 stage: "x" }'),
        (
            ["train_state.stage=y", "train_state.stage=z"],
            'train_state { level: 1 stage: "y" stage: "z" }',
        ),
        (["train_state={level: 3}"], "train_state { level: 3 }"),
        (["train_state=level: 3"], "train_state { level: 3 }"),
        (
            ["test_state=[{level: 1}, {level: 2}]"],
            "test_state { level: 1 } test_state { level: 2 }",
        ),
        (["net_param.name=n"], 'net_param { name: "n" }'),
    ],
)
def test_a_field_is_replaced(settings: list[str], holds: str) -> None:
    before, names = (
        solver(),
        {setting.partition("=")[0].partition(".")[0].strip() for setting in settings},
    )
    after = override(before, settings)
    set_alone = SolverParameter()
    set_alone.CopyFrom(after)
    for field, _ in after.ListFields():
        if field.name not in names:
            set_alone.ClearField(field.name)
    assert " ".join(to_text(set_alone).split()) == holds
    assert before == solver(), "what was given is not changed"


def test_one_train_net_and_one_type_take_the_place_of_the_others() -> None:
    after = override(solver(), ["train_net=b.prototxt", "solver_type=ADAM"])
    assert (after.train_net, after.HasField("net"), after.HasField("type")) == (
        "b.prototxt",
        False,
        False,
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_iters=5", "--set max_iters=5: unknown field 'max_iters' in SolverParameter"),
        ("learning_rate=5", r"did you mean 'base_lr'\?"),
        ("max_iter=many", "--max_iter=many: max_iter in SolverParameter: expected an integer"),
        ("max_iter=5 base_lr: 9", "expected one value for max_iter"),
        ("solver_mode=CPUs", "--solver_mode=CPUs: .* did you mean 'CPU'"),
        ("max_iter", "--set max_iter: expected FIELD=VALUE, such as base_lr=0.1"),
        ("max_iter=", "--max_iter=: no value for max_iter"),
        ("snapshot_prefix=caf\udce9", "the value of snapshot_prefix must be UTF-8 text"),
        ("=5", "expected FIELD=VALUE"),
        ("max_iter.x=5", "'max_iter' has no fields that can be set"),
        ("test_state.level=5", "'test_state' has no fields that can be set"),
        ("train_state.lewel=5", r"unknown field 'lewel' in NetState; did you mean 'level'\?"),
        ("train_state={level: x}", "--set train_state={level: x}: level in NetState"),
    ],
)
def test_what_does_not_fit_is_one_sentence(setting: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        override(solver(), [setting])


def test_changes_are_shown_beside_the_file() -> None:
    settings = ["max_iter=20", "display=5", "stepvalue=[7, 8]", "train_state.level=2"]
    settings += ["solver_mode=CPU", "max_iter=30"]
    assert changes(solver(), override(solver(), settings), settings) == (
        "max_iter: 30 (file: 4000), display: 5 (not in the file), stepvalue: 7, 8 (file: 1, 2), "
        "train_state.level: 2 (file: 1), solver_mode: CPU (not in the file)"
    )


def test_a_definition_names_the_flag_where_its_value_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text(FILE)
    solver = read_solver(path).with_settings(["max_iter=-1"])
    assert (
        str(solver.error("max_iter", "expected 0 or more"))
        == "--max_iter=-1: max_iter: expected 0 or more"
    )
    assert str(solver.error("base_lr", "wrong")) == f"{path}:1: base_lr: wrong"


def test_an_inline_net_of_the_command_line_has_no_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text(
        'net_param { input: "x" input_shape { dim: 1 }\nlayer { name: "a" type: "ReLU" bottom: '
        '"x" top: "x" } }'
    )
    solver = read_solver(path).with_settings(
        ["net_param=input: 'y' input_shape { dim: 2 } layer { name: 'b' type: 'ReLU' }"]
    )
    net = solver.net_definition()
    assert [layer.name for layer in net.param.layer][-1] == "b"
    assert net.layer_lines == ()
