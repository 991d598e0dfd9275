"""A database is known by its files, and every other folder is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.data.databases import Backend, detect, require, require_kind
from poseidon.caffe.proto.caffe_pb2 import DataParameter
from poseidon.cli.main import COMMANDS
from poseidon.errors import DataError, UsageError
from tests.support.databases import BACKENDS, make_pictures


def test_the_numbers_are_those_of_the_schema() -> None:
    assert {name: int(Backend[name]) for name in dict(DataParameter.DB.items())} == dict(
        DataParameter.DB.items()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_database_is_detected(tmp_path: Path, backend: Backend) -> None:
    path = make_pictures(tmp_path / "db", 1, backend=backend)
    assert detect(path) is backend
    assert require(path) is backend
    require_kind(path, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_for_a_wrong_kind_has_the_right_setting(tmp_path: Path, backend: Backend) -> None:
    path = make_pictures(tmp_path / "db", 1, backend=backend)
    other = Backend(1 - backend)
    with pytest.raises(
        DataError,
        match=rf"{path} is {backend.title}, but was named as {other.title}: write backend: {backend.name}$",
    ):
        require_kind(path, other)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mnist_train_lmdb", "convert_mnist"),
        ("mnist_siamese_train_lmdb", "convert_mnist_siamese"),
        ("cifar10_test_leveldb", "prepare_cifar10"),
    ],
)
def test_a_missing_database_names_its_path_and_the_way_to_make_it(
    tmp_path: Path, name: str, command: str
) -> None:
    assert command in COMMANDS
    with pytest.raises(
        DataError,
        match=rf"{tmp_path}/{name} does not exist: create it first with poseidon {command} \(",
    ):
        require(tmp_path / name)


def test_a_missing_database_of_pictures_names_the_commands(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        require(tmp_path / "train db")
    assert str(caught.value) == (
        f"the database {tmp_path}/train db does not exist: create it first with poseidon make_db "
        "--format=caffe FOLDER 'train db', of a folder with a sub-folder of pictures for each "
        "class, with convert_imageset, of a list, or with convert_annoset, of a list with objects; "
        "for a net of the zoo the README.md of a folder of `poseidon init` has the command"
    )


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_something_else_is_not_a_database(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    path.mkdir() if kind == "folder" else path.write_text("words")
    with pytest.raises(DataError, match="thing is not a database"):
        require(path)
    assert not list(path.iterdir()) if kind == "folder" else True


def test_backend_names() -> None:
    assert Backend.parse("LMDB") is Backend.LMDB
    assert Backend.parse("leveldb") is Backend.LEVELDB
    with pytest.raises(UsageError, match="unknown backend 'hdf5': expected lmdb or leveldb"):
        Backend.parse("hdf5")
