"""Data sets in memory, and their operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.dataset import Dataset
from poseidon.caffe2.schema import (
    ConstRecord,
    FeedRecord,
    FetchRecord,
    List,
    NewRecord,
    Scalar,
    Struct,
)


def filled() -> tuple[Dataset, Any]:
    """Four records in the workspace, each a number and a list of names with lists, and a net for
    the reader.
    """
    schema = Struct(
        ("id", np.int64), ("sets", List(Struct(("name", np.bytes_), ("x", List(np.int64)))))
    )
    net = core.Net("make")
    record = NewRecord(net, schema)
    values = dict(
        zip(
            record.field_names(),
            [
                np.array([10, 11, 12, 13]),
                np.array([2, 0, 1, 2], dtype=np.int32),
                np.array([b"a", b"b", b"c", b"d", b"e"], dtype=object),
                np.array([1, 0, 3, 2, 0], dtype=np.int32),
                np.arange(6),
            ],
            strict=True,
        )
    )
    for name, blob in zip(record.field_names(), record.field_blobs(), strict=True):
        workspace.FeedBlob(str(blob), values[name])
    return Dataset(record, "nested"), net


BATCHES = [
    [[10, 11], [2, 0], ["a", "b"], [1, 0], [0]],
    [[12, 13], [1, 2], ["c", "d", "e"], [3, 2, 0], [1, 2, 3, 4, 5]],
    [[], [], [], [], []],
]


def read(net: Any, record: Any) -> list[Any]:
    workspace.RunNet(net)
    columns = [workspace.FetchBlob(blob) for blob in record.field_blobs()]
    return [[x.decode() if isinstance(x, bytes) else x for x in each.tolist()] for each in columns]


def test_batches_have_the_nested_values_of_their_records() -> None:
    data, net = filled()
    reader = data.reader(net, batch_size=2)
    read_net, reset_net = core.Net("read"), core.Net("reset")
    end, record = reader.read_record(read_net)
    reader.reset(reset_net)
    workspace.RunNetOnce(net)
    workspace.CreateNet(read_net)
    for _ in range(2):
        for expected in BATCHES:
            assert read(read_net, record) == expected
            assert workspace.FetchBlob(end).item() == (expected[0] == [])
        workspace.RunNetOnce(reset_net)
    bytes_ = workspace.SerializeBlob("nested_cursor")
    assert read(read_net, record) == BATCHES[0]
    workspace.DeserializeBlob("nested_cursor", bytes_)
    assert read(read_net, record) == BATCHES[0]


def test_a_smaller_last_batch_is_left_out() -> None:
    data, net = filled()
    reader = data.reader(net, batch_size=3, enforce_batch_size=True)
    read_net = core.Net("read")
    _, record = reader.read_record(read_net)
    workspace.RunNetOnce(net)
    workspace.CreateNet(read_net)
    assert [read(read_net, record)[0] for _ in range(2)] == [[10, 11, 12], []]


@pytest.mark.parametrize("loop_over", [False, True])
def test_an_order_of_its_own(loop_over: bool) -> None:
    data, net = filled()
    workspace.FeedBlob("order", np.array([3, 0, 2, 1]))
    reader = data.random_reader(net, core.BlobReference("order"), batch_size=2, loop_over=loop_over)
    offsets, read_net = core.Net("offsets"), core.Net("read")
    reader.computeoffset(offsets)
    _, record = reader.read_record(read_net)
    workspace.RunNetOnce(net)
    workspace.RunNetOnce(offsets)
    workspace.CreateNet(read_net)
    assert workspace.FetchBlob("offsets").tolist() == [
        [0, 0, 0],
        [1, 2, 1],
        [2, 2, 1],
        [3, 3, 4],
        [4, 5, 6],
    ]
    assert read(read_net, record) == [
        [13, 10],
        [2, 2],
        ["d", "e", "a", "b"],
        [2, 0, 1, 0],
        [4, 5, 0],
    ]
    assert read(read_net, record)[0] == [12, 11]
    assert read(read_net, record)[0] == ([13, 10] if loop_over else [])


def test_sorted_and_shuffled() -> None:
    net = core.Net("sort")
    record = ConstRecord(net, Struct(("a", np.arange(10)), ("key", np.arange(10)[::-1].copy())))
    reader = Dataset(record).random_reader(net, batch_size=2)
    reader.sort_and_shuffle(net, "key", shuffle_size=1, batch_size=2)
    workspace.RunNetOnce(net)
    order = workspace.FetchBlob(reader.indices).tolist()
    assert sorted(order) == list(range(10))
    assert {tuple(sorted(order[i : i + 2])) for i in range(0, 10, 2)} == {
        (i, i + 1) for i in range(0, 10, 2)
    }
    with pytest.raises(AssertionError, match="is not in"):
        reader.sort_and_shuffle(net, "other")


def test_records_are_appended_and_checked() -> None:
    data = Dataset(Struct(("a", np.int32), ("l", List(np.float32))), "new")
    init, write = core.Net("init"), core.Net("write")
    data.init_empty(init)
    writer = data.writer(init)
    batch = Struct(("a", np.int32([1, 2])), ("l", List(np.float32([5, 6, 7]), np.int32([1, 2]))))
    writer.write_record(write, ConstRecord(write, batch))
    workspace.RunNetOnce(init)
    workspace.CreateNet(write)
    workspace.RunNet(write, 2)
    columns = [column.tolist() for column in FetchRecord(data.content()).field_blobs()]
    assert columns == [[1, 2, 1, 2], [1, 2, 1, 2], [5, 6, 7, 5, 6, 7]]
    trim = core.Net("trim")
    data.trim(trim, multiple_of=3)
    workspace.RunNetOnce(trim)
    columns = [column.tolist() for column in FetchRecord(data.content()).field_blobs()]
    assert columns == [[1, 2, 1], [1, 2, 1], [5, 6, 7, 5]]
    wrong = core.Net("wrong")
    record = Struct(("a", np.int32([1, 2])), ("l", List(np.float32([5, 6]), np.int32([1, 2]))))
    writer.write_record(wrong, ConstRecord(wrong, record))
    with pytest.raises(RuntimeError, match="lengths l:lengths sum up to 3"):
        workspace.RunNetOnce(wrong)


def test_names_of_columns_are_a_schema_too() -> None:
    data = Dataset(["a", "b:lengths", "b:values"])
    assert data.field_names() == ["a", "b:lengths", "b:values"]
    assert isinstance(data.schema, Struct) and isinstance(data.schema.a, Scalar)
    with pytest.raises(AssertionError, match="not initialized"):
        data.reader(core.Net("n"))


def test_a_new_data_set_leaves_the_blobs_of_its_schema_as_they_are() -> None:
    net = core.Net("copy")
    record = NewRecord(net, Struct(("a", np.array([1, 2]))))
    FeedRecord(record, Struct(("a", np.array([1, 2]))))
    other = Dataset(record)
    other.init_empty(net)
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob(record.a()).tolist() == [1, 2]
    assert workspace.FetchBlob(other.content().a()).tolist() == []


def test_a_fed_record_is_written_by_the_net_that_named_it() -> None:
    net = core.Net("fed")
    data = Dataset(Struct(("a", np.int64)))
    data.init_empty(net)
    record = NewRecord(net, Struct(("a", np.array([1, 2]))))
    FeedRecord(record, [np.array([1, 2])])
    data.writer(net).write_record(net, record)
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob(data.content().a()).tolist() == [1, 2]
