"""Readers of saved columns: what they read, and which databases they know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.db_file_reader import DBFileReader
from poseidon.caffe2.pipeline import pipe
from poseidon.caffe2.schema import FetchRecord
from poseidon.caffe2.session import LocalSession
from poseidon.caffe2.task import TaskGroup


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Return a database of two columns."""
    workspace.FeedBlob("label", np.arange(5))
    workspace.FeedBlob("score", np.arange(5, dtype="f4") / 2)
    path = tmp_path / "columns.db"
    op = core.CreateOperator(
        "Save", ["label", "score"], [], db=str(path), db_type="minidb", absolute_path=True
    )
    workspace.RunOperatorOnce(op)
    workspace.ResetWorkspace()
    return str(path)


@pytest.mark.parametrize("names", [None, ["label", "score"]])
def test_all_records_are_read_once(saved: str, names: list[str] | None) -> None:
    reader = DBFileReader(saved, "minidb", batch_size=2, field_names=names)
    assert reader.schema().field_names() == ["label", "score"]
    assert reader.name == "columns_db_file_reader"
    seen: list[tuple[int, float]] = []

    def keep(record: object) -> None:
        labels, scores = FetchRecord(record).field_blobs()
        seen.extend(zip(labels.tolist(), scores.tolist(), strict=True))

    init, read = core.Net("init"), core.Net("read")
    reader.setup_ex(init, None)
    _, record = reader.read_record(read)
    workspace.RunNetOnce(init)
    for _ in range(3):
        workspace.RunNetOnce(read)
        keep(record)
    assert sorted(seen) == [(number, number / 2) for number in range(5)]


def test_it_is_a_source_of_a_pipeline(saved: str) -> None:
    reader = DBFileReader(saved, "minidb", name="source", batch_size=5)
    counted: list[int] = []
    with TaskGroup() as group:
        pipe(reader, processor=lambda record: counted.append(len(record.field_blobs())) or record)
    LocalSession().run(group)
    assert counted == [2]


def test_an_unknown_type_names_those_that_are_known() -> None:
    with pytest.raises(AssertionError, match=r"db_type \[oracle\] is not available.*minidb"):
        DBFileReader("x.db", "oracle")
