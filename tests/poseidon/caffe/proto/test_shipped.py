"""Definitions that travel: read on another machine as they are here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from poseidon.base.paths import portable
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.proto.shipped import pack_solver, unpack_solver
from poseidon.errors import DefinitionError

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
