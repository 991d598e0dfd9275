"""Readers: shards, turns of operators, and the place after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from poseidon.caffe2.runtime.databases import write_records
from poseidon.caffe2.runtime.reader import MAX_WAITING, Consumer, Reader, Turns

COUNT = 7
SHARDS: list[dict[str, Any]] = [
    {},
    {"num_shards": 3, "shard_id": 1},
    {"num_shards": 2, "shard_id": 1, "shard_sizes": [1, 3]},
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Seven records, whose values are their numbers."""
    found = str(tmp_path / "records")
    write_records(found, "minidb", ((b"%d" % n, b"%d" % n) for n in range(COUNT)))
    return found


def values(turns: Turns, reader: Reader) -> list[int]:
    return [int(record.value) for record in reader.take(turns)]


@pytest.mark.parametrize(
    ("shard", "expected", "numbers"),
    [
        (SHARDS[0], [0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 4, 5, 6, 7]),
        (SHARDS[1], [1, 4, 1, 4], [1, 4, 7, 10]),
        (SHARDS[2], [1, 2, 3, 5, 6, 0, 2], [1, 2, 3, 5, 6, 7, 9]),
    ],
)
def test_the_records_of_a_shard(
    path: str, shard: dict[str, Any], expected: list[int], numbers: list[int]
) -> None:
    reader = Reader(path, "minidb", **shard)
    records = [reader.read() for _ in expected]
    assert [int(record.value) for record in records] == expected
    assert [record.number for record in records] == numbers


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 16])
def test_skipping_is_reading(path: str, shard: dict[str, Any], count: int) -> None:
    read, skipped = (Reader(path, "minidb", **shard) for _ in range(2))
    for _ in range(count):
        read.read()
    skipped.skip(count)
    assert [skipped.read() for _ in range(9)] == [read.read() for _ in range(9)]
    skipped.rewind()
    assert skipped.read() == Reader(path, "minidb", **shard).read()


def test_operators_take_turns_in_the_order_of_their_making(path: str) -> None:
    reader = Reader(path, "minidb")
    first, second = reader.join(2), reader.join(1)
    assert values(second, reader) == [2]
    assert values(second, reader) == [5]
    assert values(first, reader) == [0, 1]
    assert values(first, reader) == [3, 4]


def test_an_operator_that_does_not_run_keeps_few_batches(path: str) -> None:
    reader = Reader(path, "minidb")
    idle, busy = reader.join(1), reader.join(1)
    for _ in range(20):
        reader.take(busy)
    assert len(idle.waiting) == MAX_WAITING


def test_an_operator_that_is_gone_has_no_turn(path: str) -> None:
    reader = Reader(path, "minidb")
    gone, left = reader.join(1), reader.join(1)
    reader.take(gone)
    del gone
    assert [values(left, reader) for _ in range(3)] == [[1], [2], [3]]


def test_a_consumer_follows_its_input(path: str) -> None:
    first, second = (Reader(path, "minidb") for _ in range(2))
    consumer = Consumer(1, first)
    assert [int(consumer.take(first)[0].value) for _ in range(2)] == [0, 1]
    assert int(consumer.take(second)[0].value) == 0


@pytest.mark.parametrize("sizes", [[1], [1, 0]])
def test_sizes_that_are_none(path: str, sizes: list[int]) -> None:
    with pytest.raises(RuntimeError, match="shard_sizes must be 2 numbers above 0"):
        Reader(path, "minidb", 2, 0, shard_sizes=sizes)
