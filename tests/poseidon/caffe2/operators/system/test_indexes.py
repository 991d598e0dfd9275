"""Indexes of keys, and maps of integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import call


def texts(*words: str) -> np.ndarray:
    return np.array([word.encode() for word in words], dtype=object)


def run(kind: str, inputs: list[str], outputs: list[str], **arguments: object) -> list[np.ndarray]:
    call(kind, inputs, outputs, **arguments)
    return [workspace.FetchBlob(name) for name in outputs]


@pytest.fixture
def index() -> str:
    run("StringIndexCreate", [], ["index"], max_elements=6)
    return "index"


def numbers_of(index: str, keys: np.ndarray) -> list[int]:
    workspace.FeedBlob("keys", keys)
    return run("IndexGet", [index, "keys"], ["numbers"])[0].tolist()


def test_keys_are_numbered_as_they_come(index: str) -> None:
    workspace.FeedBlob("first", texts("a", "b"))
    run("IndexLoad", [index, "first"], [])
    assert numbers_of(index, texts("a", "c", "a", "d")) == [1, 3, 1, 4]
    run("IndexFreeze", [index], [])
    assert numbers_of(index, texts("x", "d", "a")) == [0, 4, 1]
    assert run("IndexStore", [index], ["stored"])[0].tolist() == [b"a", b"b", b"c", b"d"]
    assert run("IndexSize", [index], ["size"])[0] == 5


def test_the_first_of_the_keys_that_are_loaded_may_be_the_missing_one(index: str) -> None:
    workspace.FeedBlob("first", texts("none", "b"))
    run("IndexLoad", [index, "first"], [index], skip_first_entry=1)
    assert numbers_of(index, texts("b")) == [1]


def test_misuse_of_an_index_is_an_error(index: str) -> None:
    numbers_of(index, texts("a", "b", "c", "d", "e"))
    with pytest.raises(RuntimeError, match="the index is full: it has 5 keys"):
        numbers_of(index, texts("f"))
    with pytest.raises(RuntimeError, match="needs an empty index"):
        run("IndexLoad", [index, "keys"], [])
    with pytest.raises(RuntimeError, match="string keys, not"):
        numbers_of(index, np.array([1]))


@pytest.mark.parametrize(("kind", "dtype"), [("IntIndexCreate", "i4"), ("LongIndexCreate", "i8")])
def test_keys_may_be_integers(kind: str, dtype: str) -> None:
    run(kind, [], ["index"])
    assert numbers_of("index", np.array([[7, 5], [7, 6]], dtype)) == [[1, 2], [1, 3]]
    stored = run("IndexStore", ["index"], ["stored"])[0]
    assert stored.dtype == dtype
    assert stored.tolist() == [7, 5, 6]


@pytest.mark.parametrize("key", ["i4", "i8"])
@pytest.mark.parametrize("value", ["i4", "i8"])
def test_a_map_is_saved_and_loaded(tmp_path: Path, key: str, value: str) -> None:
    workspace.FeedBlob("keys", np.array([3, 1, 2], key))
    workspace.FeedBlob("values", np.array([30, 10, 20], value))
    run("KeyValueToMap", ["keys", "values"], ["map"])
    place = {"db": str(tmp_path / "db"), "db_type": "minidb", "absolute_path": 1}
    run("Save", ["map"], [], **place)
    workspace.ResetWorkspace()
    call("Load", [], ["map"], load_all=1, **place)
    keys, values = run("MapToKeyValue", ["map"], ["keys", "values"])
    assert (keys.dtype, values.dtype) == (key, value)
    assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == {1: 10, 2: 20, 3: 30}


def test_a_new_map_is_empty() -> None:
    run("CreateMap", [], ["map"], key_dtype=core.DataType.INT64, value_dtype=core.DataType.INT32)
    keys, values = run("MapToKeyValue", ["map"], ["keys", "values"])
    assert (keys.dtype, values.dtype, keys.size) == ("i8", "i4", 0)
    with pytest.raises(RuntimeError, match="int32 or int64"):
        run("CreateMap", [], ["other"], key_dtype=core.DataType.FLOAT)
