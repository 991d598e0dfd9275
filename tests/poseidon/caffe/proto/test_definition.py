"""Net and solver definitions: places of mistakes, the nets a solver names, states, prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.caffe.proto.definition import NetDefinition, SolverDefinition, read_net, read_solver
from poseidon.errors import DefinitionError

NET = 'name: "n"\nlayer {\n  name: "a" type: "ReLU"\n}\nlayer { name: "b" }\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "other.prototxt").write_text('name: "other"\nlayer { }')
    return tmp_path


def net(folder: Path) -> NetDefinition:
    return read_net(folder / "net.prototxt")


def solver(folder: Path, text: str) -> SolverDefinition:
    path = folder / "my_solver.prototxt"
    path.write_text(text)
    return read_solver(path)


def test_a_solver_with_another_train_state(folder: Path) -> None:
    (folder / "s.prototxt").write_text('net: "net.prototxt" train_state { level: 2 stage: "a" }')
    solver = read_solver(folder / "s.prototxt")
    assert solver.with_train_state(level=None, stages=()) is solver
    changed = solver.with_train_state(level=5, stages=("b", "c"))
    assert (changed.param.train_state.level, list(changed.param.train_state.stage)) == (
        5,
        ["a", "b", "c"],
    )
    assert list(solver.param.train_state.stage) == ["a"] and changed.source == solver.source


@pytest.mark.parametrize(
    "layer, expected",
    [
        (0, ":2: layer 'a' (ReLU): is wrong"),
        ("a", ":2: layer 'a' (ReLU): is wrong"),
        ("b", ":5: layer 'b': is wrong"),
        ("c", ": layer 'c': is wrong"),
    ],
)
def test_net_error_names_file_line_and_layer(folder: Path, layer: int | str, expected: str) -> None:
    assert str(net(folder).error(layer, "is wrong")) == f"{folder}/net.prototxt{expected}"


def test_a_path_that_is_not_legal_has_file_and_line(folder: Path) -> None:
    (folder / "net.prototxt").write_text(
        NET + 'layer { name: "c" data_param {\n source: "x\\000y" } }'
    )
    with pytest.raises(DefinitionError, match=r"net\.prototxt:6: layer 'c'"):
        net(folder).resolve("x\0y")
    with pytest.raises(DefinitionError, match=r"my_solver\.prototxt:2: net"):
        solver(folder, 'base_lr: 1\nnet: "x\\000y"').net_definition()
    with pytest.raises(DefinitionError, match=r"my_solver\.prototxt:1: test_net"):
        solver(folder, 'test_net: ["a", "x\\000y"]').resolve("x\0y")
    with pytest.raises(DefinitionError, match=r"my_solver\.prototxt:2: snapshot_prefix"):
        solver(folder, '\nsnapshot_prefix: "x\\000y"').snapshot_prefix()


@pytest.mark.parametrize(
    "text", ["layer { }\n\nlayers { }", "layers { }\nlayers { }\nlayer { }\nlayers { }"]
)
def test_a_net_that_mixes_both_formats_is_refused_with_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(text)
    with pytest.raises(DefinitionError, match=r"net\.prototxt:3"):
        read_net(path)


def test_net_knows_its_folder_and_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    definition = read_net("net.prototxt")
    assert (definition.folder, definition.layer_lines, definition.source) == (
        folder,
        (2, 5),
        "net.prototxt",
    )
    assert definition.resolve("other.prototxt") == folder / "other.prototxt"


@pytest.mark.parametrize("read", [read_net, read_solver])
def test_an_empty_file_is_an_error(tmp_path: Path, read: object) -> None:
    (tmp_path / "empty").write_text("\n# nothing\n")
    with pytest.raises(DefinitionError, match="the file is empty"):
        read(tmp_path / "empty")  # type: ignore[operator]


@pytest.mark.parametrize(
    "text, name",
    [
        ('net: "net.prototxt"', "n"),
        ('train_net: "net.prototxt"', "n"),
        ('net_param { name: "inside" layer { } }', "inside"),
        ('train_net_param { name: "inside" }', "inside"),
    ],
)
def test_train_net(folder: Path, text: str, name: str) -> None:
    assert solver(folder, text).net_definition().param.name == name


@pytest.mark.parametrize(
    "text, expected",
    [
        ("max_iter: "
"1", ": no train net is named; expected one of net, net_param, train_net, train_net_param"),
        ('net: "net.prototxt"\ntrain_net: '
'"x"', ":2: train_net: the train net is named twice, by net and train_net; expected"),
        ('max_iter: 1\nnet: '
'"nett.prototxt"', ":2: net: there is no net definition 'nett.prototxt' (searched: "),
        ('net: ""', ":1: net: expected the path of a net definition, found an empty string"),
        ('net: "."', "this is a folder; a prototxt file is expected"),
    ],
)  # fmt: skip
def test_train_net_mistakes(folder: Path, text: str, expected: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        solver(folder, text).net_definition()
    assert expected in str(caught.value)


def test_a_net_inside_the_solver_keeps_its_lines(folder: Path) -> None:
    definition = solver(
        folder,
        'test_net_param {\n layer { name: "t0" }\n}\n'
        'test_net_param {\n layer { name: "t1" }\n layer { name: "t2" }\n}\n'
        "test_iter: [1, 2, 3] test_interval: 1\n"
        'net_param {\n  layer {\n    name: "x"\n  }\n}\n',
    )
    assert definition.net_definition().layer_lines == (10,)
    assert str(definition.net_definition().error("x", "is wrong")).endswith(
        "my_solver.prototxt:10: layer 'x': is wrong"
    )
    assert [test.definition.layer_lines for test in definition.test_nets()] == [(2,), (5, 6), (10,)]


@pytest.mark.parametrize(
    "text, nets",
    [
        ('net: "net.prototxt"', []),
        ('net: "net.prototxt" test_iter: 7 test_interval: 1', [("n", 7)]),
        ('net: "net.prototxt" test_iter: [7, 8] test_interval: 1', [("n", 7), ("n", 8)]),
        (
            'train_net: "net.prototxt" test_net: "other.prototxt" test_net: "net.prototxt" '
            "test_iter: [1, 2] test_interval: 1",
            [("other", 1), ("n", 2)],
        ),
        (
            'net: "net.prototxt" test_net: "other.prototxt" test_net_param { name: "p" } '
            "test_iter: [1, 2, 3] test_interval: 1",
            [("p", 1), ("other", 2), ("n", 3)],
        ),
    ],
)
def test_test_nets_in_caffes_order(folder: Path, text: str, nets: list[tuple[str, int]]) -> None:
    tests = solver(folder, text).test_nets()
    assert [(test.definition.param.name, test.iterations) for test in tests] == nets


@pytest.mark.parametrize(
    "text, expected",
    [
        ('train_net: "net.prototxt" test_iter: 1', "test_iter: 1 value for 0 test nets"),
        ('train_net: "net.prototxt" test_net: "net.prototxt"', "test_iter: 0 values for 1 test"),
        (
            'net: "net.prototxt" test_iter: 1',
            "test_interval: expected a positive number, found none",
        ),
        ('net: "net.prototxt" test_iter: 0 test_interval: 1', "test_iter: expected 1 batch"),
        (
            'net: "net.prototxt" test_iter: 1 test_interval: 1 test_state { } test_state { }',
            "test_state: 2 values for 1 test net; expected none or one for each",
        ),
    ],
)
def test_test_net_mistakes(folder: Path, text: str, expected: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        solver(folder, text).test_nets()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'net: "net.prototxt" test_iter: [7, 8] test_state { } test_state { } test_interval: 1',
        'train_net: "net.prototxt" test_net: ["net.prototxt", "other.prototxt"] test_iter: [7, 8] '
        "test_interval: 1",
    ],
)
def test_a_flag_for_two_test_nets_is_given_twice(folder: Path, text: str) -> None:
    definition = solver(folder, text)
    says = "--set test_iter=3: test_iter: 1 value for 2 test nets; expected one for each: --set test_iter=3 --set test_iter=3"
    with pytest.raises(DefinitionError) as caught:
        definition.with_settings(["test_iter=3"]).test_nets()
    assert str(caught.value) == says
    both = definition.with_settings(["test_iter=3", "test_iter=3"]).test_nets()
    assert [test.iterations for test in both] == [3, 3]


def test_states_are_merged_as_caffe_does(folder: Path) -> None:
    definition = solver(
        folder,
        "test_iter: [1, 1] test_interval: 1 train_state { stage: 's' }\n"
        "test_state { stage: 'a' } test_state { level: 4 }\n"
        "net_param { state { level: 3 stage: 'n' } }",
    )
    train = definition.train_state(definition.net_definition())
    assert (train.phase, train.level, list(train.stage)) == (TRAIN, 3, ["n", "s"])
    tests = [test.state for test in definition.test_nets()]
    assert [(state.phase, state.level, list(state.stage)) for state in tests] == [
        (TEST, 3, ["n", "a"]),
        (TEST, 4, ["n"]),
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("max_iter: 1", "my_solver"),
        ('snapshot_prefix: "snaps"', "snaps/my_solver"),
        ('snapshot_prefix: "snaps/x"', "snaps/x"),
        ('snapshot_prefix: "./models/"', "models/my_solver"),
        ('snapshot_prefix: "snaps/new/"', "snaps/new/my_solver"),
        ('snapshot_prefix: "x"', "x"),
    ],
)
def test_snapshot_prefix(folder: Path, text: str, expected: str) -> None:
    (folder / "snaps").mkdir()
    assert solver(folder, text).snapshot_prefix() == folder / expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cifar10_quick_solver", "cifar10_quick"),
        ("lenet_solver_adam", "lenet_adam"),
        ("solver", "googlenet"),
        ("mine", "mine"),
    ],
)
def test_without_a_prefix_snapshots_go_to_the_job(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "googlenet").mkdir()
    path = tmp_path / "googlenet" / f"{name}.prototxt"
    path.write_text("max_iter: 1")
    assert read_solver(path).snapshot_prefix(tmp_path / "job") == tmp_path / "job" / expected
    path.write_text('max_iter: 1 snapshot_prefix: "x"')
    assert read_solver(path).snapshot_prefix(tmp_path / "job") == path.parent / "x"


def test_solver_error_names_the_line_of_the_setting(folder: Path) -> None:
    definition = solver(folder, "base_lr: 1\nnet_param { layer { } }\nmax_iter: -1")
    assert (
        str(definition.error("max_iter", "is wrong"))
        == f"{folder}/my_solver.prototxt:3: max_iter: is wrong"
    )
    assert (
        str(definition.error("layer", "is wrong"))
        == f"{folder}/my_solver.prototxt: layer: is wrong"
    )
