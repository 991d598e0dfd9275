"""Projects: the files of each, and what is not overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from poseidon.base.paths import portable
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.proto.projects import (
    pack_solver,
    project_files,
    project_title,
    projects,
    training_commands,
    unpack_solver,
    write_project,
)
from poseidon.errors import DataError, DefinitionError, UsageError


def test_each_project_has_a_title_and_the_files_of_its_commands() -> None:
    known = projects()
    assert {"lenet", "cifar10", "torch_cnn"} <= known.keys()
    for name, folder in known.items():
        files = project_files(name, folder)
        assert project_title(folder) in files["README.md"]
        *_, command = training_commands(name, folder)
        assert command in files["README.md"]
        named = {
            word.partition("=")[2] if word.startswith("--") else word for word in command.split()
        }
        assert files.keys() & (named - {"machinefile"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "inception_v3",
            [
                "--resize_height=342 --resize_width=342 --shuffle PICTURES/ train.txt ilsvrc12_train",
                "--resize_height=342 --resize_width=342 PICTURES/ val.txt ilsvrc12_val_lmdb\n",
                "not be smaller than `crop_size`, 299",
            ],
        ),
        (
            "alexnet",
            [
                "--resize_height=256 --resize_width=256 --shuffle PICTURES/ train.txt ilsvrc12_train",
                "compute_image_mean ilsvrc12_train_lmdb data/ilsvrc12/imagenet_mean.binaryproto\n",
            ],
        ),
    ],
)
def test_the_readme_makes_the_databases_that_the_nets_read(name: str, words: list[str]) -> None:
    files = project_files(name, projects()[name])
    assert all(part in files["README.md"] for part in words), files["README.md"]
    assert 'source: "ilsvrc12_train_lmdb"' in files["train_val.prototxt"]


def test_a_project_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_project(tmp_path / "new" / "mine", {"a": "text"})
    assert (tmp_path / "new" / "mine" / "a").read_text() == "text"
    with pytest.raises(UsageError, match="exists already and is not overwritten"):
        write_project(tmp_path / "new" / "mine", {"a": "other"})
    with pytest.raises(DataError, match=r"cannot make .*second: No such file or directory"):
        write_project(tmp_path / "second", {"missing/a": "text"})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


NET = 'name: "n"\nlayer { name: "d" type: "Data" top: "d" data_param { source: "db" batch_size: 1 } }\n'
SOLVER = 'net: "train.prototxt"\ntest_net: "nets/test.prototxt"\ntest_iter: 1\ntest_iter: 1\ntest_interval: 5\nbase_lr: 0.5\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work" / "nets").mkdir(parents=True)
    (tmp_path / "work" / "solver.prototxt").write_text(SOLVER)
    (tmp_path / "work" / "train.prototxt").write_text(NET)
    (tmp_path / "work" / "nets" / "test.prototxt").write_text(NET.replace('"n"', '"t"'))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_it_is_read_where_no_file_is(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_solver("solver.prototxt")
    text = pack_solver(Path("solver.prototxt"))
    shutil.rmtree(here / "nets")
    for path in here.glob("*.prototxt"):
        path.unlink()
    (tmp_path / "there" / "nets").mkdir(parents=True)
    (tmp_path / "there" / "nets" / "db").touch()
    monkeypatch.chdir(tmp_path / "there")
    solver = unpack_solver(text)
    assert (solver.param, solver.source, solver.lines) == (
        expected.param,
        "solver.prototxt",
        expected.lines,
    )
    assert solver.net_definition().param.name == "n"
    (test, common) = solver.test_nets()
    assert (test.definition.param.name, common.definition.param.name) == ("t", "n")
    # A relative source is meant beside the net's file, where that folder is there too.
    assert test.definition.resolve("db") == tmp_path / "there" / "nets" / "db"
    # An option of the command line keeps the nets.
    assert solver.with_train_state(level=1, stages=["s"]).net_definition().param.name == "n"


def test_a_file_that_is_there_under_the_same_name_does_not_count(here: Path) -> None:
    text = pack_solver(Path("solver.prototxt"))
    (here / "train.prototxt").write_text(NET.replace('"n"', '"other"'))
    assert unpack_solver(text).net_definition().param.name == "n"


def test_a_mistake_keeps_its_place(here: Path) -> None:
    (here / "train.prototxt").write_text(NET + "layer { name: 5 }\n")
    with pytest.raises(DefinitionError, match=r"train.prototxt:3"):
        unpack_solver(pack_solver(Path("solver.prototxt")))


def test_portable_paths(here: Path) -> None:
    assert portable(here / "nets") == "nets"
    assert portable(Path("nets/../nets")) == "nets/../nets"
    assert portable(here.parent) == str(here.parent)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"nets": {}, "source": "s", "folder": "f", "content": "!"}']
)
def test_damaged_texts(text: str) -> None:
    with pytest.raises(DefinitionError, match="damaged"):
        unpack_solver(text)
