"""Save, Load, readers and batches of TensorProtos, over all kinds of databases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import utils, workspace
from poseidon.caffe2.proto.caffe2_pb2 import (
    BlobSerializationOptions,
    SerializationOptions,
    TensorProto,
    TensorProtos,
)
from poseidon.caffe2.runtime.databases import records, write_records
from tests.support.caffe2_operators import call

VALUES: dict[str, Any] = {
    "f": np.arange(6, dtype="f4").reshape(2, 3),
    "i": np.array([1, 2], np.int32),
    "h": np.array([0.5], np.float16),
    "s": np.array([b"a", b"bc"], dtype=object),
    "e": np.zeros((0, 2), "f4"),
    "scope/g": np.array([True, False]),
}


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    workspace.ResetWorkspace(str(tmp_path))
    for name, value in VALUES.items():
        workspace.FeedBlob(name, value)
    where = {"db": str(tmp_path / "s.minidb"), "db_type": "minidb", "absolute_path": 1}
    call("Save", list(VALUES), [], **where)
    workspace.ResetWorkspace()
    return where


@pytest.mark.parametrize(("db_type", "chunk_size"), [("minidb", -1), ("lmdb", 2)])
def test_blobs_come_back(tmp_path: Path, db_type: str, chunk_size: int) -> None:
    workspace.ResetWorkspace(str(tmp_path))
    for name, value in VALUES.items():
        workspace.FeedBlob(name, value)
    call("Save", list(VALUES), [], db="saved", db_type=db_type, chunk_size=chunk_size)
    workspace.ResetWorkspace(str(tmp_path))
    call("Load", [], [], db="saved", db_type=db_type, load_all=1)
    assert sorted(workspace.Blobs()) == sorted(VALUES)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(workspace.FetchBlob(name), value)


def test_names(saved: dict[str, Any]) -> None:
    call("Load", [], [], load_all=1, strip_prefix="scope/", add_prefix="new/", **saved)
    call("Save", ["new/g"], [], blob_name_overrides=["other"], **saved)
    assert [key for key, _ in records(saved["db"], "minidb")] == [b"other#%0"]


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "message"),
    [
        ("Load", [], ["f", "f"], "Duplicated output name: f"),
        ("Load", [], ["f", "nothing"], "The database has no blob nothing"),
        ("Save", ["f", "f"], [], "Duplicated blob name: f"),
    ],
)
def test_wrong_inputs_of_databases_are_refused(
    saved: dict[str, Any], kind: str, inputs: list[str], outputs: list[str], message: str
) -> None:
    workspace.FeedBlob("f", VALUES["f"])
    with pytest.raises(RuntimeError, match=message):
        call(kind, inputs, outputs, **saved)


def test_missing_blobs_may_be_allowed(saved: dict[str, Any]) -> None:
    call("Load", [], ["f", "nothing"], allow_incomplete=1, **saved)
    np.testing.assert_array_equal(workspace.FetchBlob("f"), VALUES["f"])


def test_a_file_that_is_missing_or_cut_off_is_an_error(saved: dict[str, Any]) -> None:
    path = Path(saved["db"])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RuntimeError, match="cut off"):
        call("Load", [], [], load_all=1, **saved)
    path.unlink()
    with pytest.raises(RuntimeError, match="Cannot open the minidb"):
        call("Load", [], [], load_all=1, **saved)


@pytest.mark.parametrize(
    ("db", "db_type", "message"),
    [
        ("none", "lmdb", r"The database \S+none does not exist"),
        ("lmdb", "leveldb", r"The database \S+lmdb is LMDB \(lmdb\), not leveldb"),
        ("lmdb", "minidb", r"The database \S+lmdb is LMDB \(lmdb\), not minidb"),
        ("lmdb/data.mdb/x", "minidb", r"Cannot write the database \S+mdb/x: Not a directory"),
        ("lmdb/data.mdb/x", "lmdb", r"\] \S+mdb/x cannot be created: \S+data.mdb: Not a directory"),
    ],
)
def test_a_database_that_is_missing_or_of_another_kind_is_one_sentence(
    saved: dict[str, Any], tmp_path: Path, db: str, db_type: str, message: str
) -> None:
    workspace.FeedBlob("f", VALUES["f"])
    call("Save", ["f"], [], **{**saved, "db": str(tmp_path / "lmdb"), "db_type": "lmdb"})
    kind, inputs, outputs = ("Save", ["f"], []) if "/" in db else ("CreateDB", [], ["reader"])
    with pytest.raises(RuntimeError, match=message):
        call(kind, inputs, outputs, **{**saved, "db": str(tmp_path / db), "db_type": db_type})


@pytest.mark.parametrize("db_type", ["minidb", "lmdb"])
def test_missing_folders_are_made(saved: dict[str, Any], tmp_path: Path, db_type: str) -> None:
    workspace.FeedBlob("f", VALUES["f"])
    call("Save", ["f"], [], **{**saved, "db": str(tmp_path / "new/folder/db"), "db_type": db_type})
    assert (tmp_path / "new/folder/db").exists()


def test_several_databases(saved: dict[str, Any], tmp_path: Path) -> None:
    workspace.FeedBlob("more", VALUES["i"])
    second = str(tmp_path / "second.minidb")
    call("Save", ["more"], [], **{**saved, "db": second})
    rest = {"db_type": "minidb", "absolute_path": 1}
    workspace.ResetWorkspace()
    call("Load", [], ["f", "more"], dbs=[saved["db"], second], **rest)
    assert sorted(workspace.Blobs()) == ["f", "more"]
    with pytest.raises(RuntimeError, match="in more than one database"):
        call("Load", [], [], dbs=[second, second], load_all=1, **rest)


def test_checkpoints_by_iteration(tmp_path: Path) -> None:
    workspace.ResetWorkspace(str(tmp_path))
    for iteration in range(4):
        workspace.FeedBlob("iter", np.array([iteration]))
        call("Checkpoint", ["iter"], [], db="at_%d", db_type="minidb", every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at_0", "at_2"]
    call("DBExists", [], ["there"], db_name="at_2", db_type="minidb")
    assert workspace.FetchBlob("there")


@pytest.fixture(params=["minidb", "lmdb", "leveldb"])
def numbered(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    pairs = []
    for number in range(5):
        message = TensorProtos()
        message.protos.add(data_type=TensorProto.FLOAT, dims=[2], float_data=[number, -number])
        message.protos.add(data_type=TensorProto.INT32, dims=[], int32_data=[number])
        pairs.append((b"%03d" % number, message.SerializeToString()))
    path = str(tmp_path / "numbered")
    write_records(path, request.param, pairs)
    return path, request.param


@pytest.mark.parametrize(
    ("shards", "shard", "labels"),
    [
        (1, 0, [[0, 1], [2, 3], [4, 0]]),
        (2, 1, [[1, 3], [1, 3]]),
        (3, 2, [[2, 2]]),
        (2, 0, [[0, 2], [4, 0]]),
    ],
)
def test_a_reader_gives_the_records_of_its_shard(
    numbered: tuple[str, str], shards: int, shard: int, labels: list[list[int]]
) -> None:
    path, db_type = numbered
    call("CreateDB", [], ["reader"], db=path, db_type=db_type, num_shards=shards, shard_id=shard)
    for expected in labels:
        call("TensorProtosDBInput", ["reader"], ["data", "label"], batch_size=2)
        assert workspace.FetchBlob("label").tolist() == expected
        np.testing.assert_array_equal(workspace.FetchBlob("data"), [[n, -n] for n in expected])
    call("TensorProtosDBInput", ["reader"], ["data", "label"])
    assert workspace.FetchBlob("data").shape == (2,)


def test_a_record_of_another_format_is_an_error(numbered: tuple[str, str]) -> None:
    path, db_type = numbered
    workspace.ResetWorkspace()
    call("CreateDB", [], ["reader"], db=path, db_type=db_type)
    with pytest.raises(RuntimeError, match="has 2 tensors, expected a TensorProtos of 3"):
        call("TensorProtosDBInput", ["reader"], ["a", "b", "c"])
    with pytest.raises(RuntimeError, match="no record of shard 7"):
        call("CreateDB", [], ["reader"], db=path, db_type=db_type, num_shards=9, shard_id=7)


def test_records_of_other_shapes_are_named(tmp_path: Path) -> None:
    def record(size: int) -> bytes:
        return TensorProtos(
            protos=[utils.NumpyArrayToCaffe2Tensor(np.ones(size, "float32"))]
        ).SerializeToString()

    path = str(tmp_path / "mixed.minidb")
    write_records(path, "minidb", [(b"a", record(2)), (b"b", record(3))])
    call("CreateDB", [], ["reader"], db=path, db_type="minidb")
    with pytest.raises(RuntimeError, match=r"mixed.minidb \(minidb\) have tensors of the shapes"):
        call("TensorProtosDBInput", ["reader"], ["a"], batch_size=2)


def messages(path: Path) -> dict[str, int]:
    """Return the number of messages of each blob in a minidb."""
    counts: dict[str, int] = {}
    for key, _ in records(str(path), "minidb"):
        name = key.decode().partition("#%")[0]
        counts[name] = counts.get(name, 0) + 1
    return counts


@pytest.mark.parametrize(
    ("arguments", "wanted"), [({}, 2), ({"chunk_size": -1}, 2), ({"chunk_size": 0}, 1)]
)
def test_large_blobs_are_split_unless_it_is_not_wanted(
    tmp_path: Path, arguments: dict[str, Any], wanted: int
) -> None:
    workspace.FeedBlob("x", np.zeros(1_000_010, "u1"))
    where = {"db": str(tmp_path / "db"), "db_type": "minidb", "absolute_path": 1}
    call("Save", ["x"], [], **where, **arguments)
    assert messages(tmp_path / "db") == {"x": wanted}


def test_options_give_chunk_sizes_by_name(tmp_path: Path) -> None:
    names = ["one_16", "two_16", "rest"]
    for name in names:
        workspace.FeedBlob(name, np.zeros(100, "f4"))
    rules = [("one_16", 10), (".*_16", 20), ("two_16", 50), ("re", 1)]
    options = SerializationOptions(
        options=[
            BlobSerializationOptions(blob_name_regex=name, chunk_size=size) for name, size in rules
        ]
    )
    where = {"db": str(tmp_path / "db"), "db_type": "minidb", "absolute_path": 1}
    call("Save", names, [], chunk_size=25, options=options, **where)
    assert messages(tmp_path / "db") == {"one_16": 10, "two_16": 5, "rest": 4}


def test_the_size_of_saved_blobs_is_estimated() -> None:
    workspace.FeedBlob("x", np.zeros(100, "f4"))
    workspace.FeedBlob("short", np.zeros(10, "u2"))
    workspace.FeedBlob("text", np.array([b"a", b"b"], dtype=object))
    options = SerializationOptions(
        options=[BlobSerializationOptions(blob_name_regex="x", chunk_size=25)]
    )
    call("EstimateAllBlobSizes", [], ["names", "sizes"], options=options)
    names, sizes = (workspace.FetchBlob(name).tolist() for name in ("names", "sizes"))
    assert dict(zip(names, sizes, strict=True)) == {
        b"x": 4 * 51 + 400,
        b"short": 55 + 30,
        b"text": 54 + 100,
        b"names": 55 + 5 * 50,
        b"sizes": 55 + 5 * 8,
    }


def test_numbers_of_sixteen_bits_are_read_as_floats() -> None:
    halves = torch.tensor([1.5, -2.0]).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    message = TensorProto(
        dims=[2], data_type=TensorProto.FLOAT, data_format=TensorProto.FMT_BFLOAT16, raw_data=halves
    )
    workspace.ResetWorkspace()
    workspace.FeedBlob("x", message)
    np.testing.assert_array_equal(workspace.FetchBlob("x"), np.array([1.5, -2.0], "f4"))


def test_a_database_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    workspace.FeedBlob("x", np.ones(3, "float32"))
    call("CreateAtomicBool", [], ["no_tensor"])
    path = tmp_path / "db"
    settings: dict[str, Any] = {"db": str(path), "db_type": "minidb", "absolute_path": 1}
    call("Save", ["x"], [], **settings)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="cannot be serialized"):
        call("Save", ["x", "no_tensor"], [], **settings)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["db"]
