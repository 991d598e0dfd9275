"""Readers that stop early, join others or count, and pipelines of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.dataio import (
    CompositeReader,
    CompositeReaderBuilder,
    CounterReader,
    CountUntil,
    PipedReaderBuilder,
    Reader,
    ReaderBuilder,
    ReaderWithDelay,
    ReaderWithLimit,
    ReaderWithTimeLimit,
)
from poseidon.caffe2.dataset import Dataset
from poseidon.caffe2.net_builder import ops
from poseidon.caffe2.pipeline import NetProcessor, pipe, pipe_and_output
from poseidon.caffe2.schema import ConstRecord, NewRecord, Struct
from poseidon.caffe2.session import LocalSession
from poseidon.caffe2.task import Task, TaskGroup, WorkspaceType


def values(count: int, name: str = "x") -> Reader:
    """A reader of 0, 1, ... from a data set of the workspace."""
    net = core.Net(name)
    record = ConstRecord(net, Struct((name, np.arange(count))))
    reader = Dataset(record, name).reader(net)
    workspace.RunNetOnce(net)
    return reader


def total_of(reader: Reader, field: str) -> tuple[int, bool | None]:
    """The sum of all that a pipeline reads, and whether the data were finished."""
    session = LocalSession()
    with TaskGroup(WorkspaceType.GLOBAL) as init, Task():
        total = ops.Const([0])
    session.run(init)

    def add(record: Any) -> None:
        ops.Add([total, record[field]()], [total])

    with TaskGroup(WorkspaceType.GLOBAL) as group:
        pipe(reader, processor=add)
    session.run(group)
    finished = (
        workspace.FetchBlob(reader.data_finished()) if hasattr(reader, "data_finished") else None
    )
    return int(workspace.FetchBlob(total).item()), None if finished is None else bool(finished)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: values(5), (10, None)),
        (lambda: ReaderWithLimit(values(5), 3), (3, False)),
        (lambda: ReaderWithLimit(values(5), 9), (10, True)),
        (lambda: ReaderWithLimit(values(5), None), (10, True)),
        (lambda: ReaderWithTimeLimit(values(5), None), (10, True)),
        (lambda: ReaderWithTimeLimit(values(5), 3600), (10, True)),
        (lambda: ReaderWithTimeLimit(values(5), 1e-9), (0, False)),
        (lambda: ReaderWithDelay(values(5), 0), (10, None)),
    ],
)
def test_limits(make: Any, expected: tuple[int, bool | None]) -> None:
    assert total_of(make(), "x") == expected


def test_integers_are_counted() -> None:
    reader = CountUntil(4)
    session = LocalSession()
    with TaskGroup(WorkspaceType.GLOBAL) as init, Task():
        total = ops.Const([0])
    session.run(init)
    with TaskGroup(WorkspaceType.GLOBAL) as group:
        _, output = pipe_and_output(
            reader,
            processor=lambda record: ops.Add([total, record.iter()], [total]) and None,
            final_outputs=total,
        )
    session.run(group)
    assert output.fetch().tolist() == [6]
    assert isinstance(CounterReader().schema(), Struct)


def test_several_readers_at_once() -> None:
    joined = CompositeReader(["a", "b"], [values(3, "x"), values(5, "y")])
    assert joined.schema().field_names() == ["a:x", "b:y"]
    # the batch at the end of the shorter one may count or not
    assert total_of(joined, "b:y")[0] in (3, 6)

    class Builder(ReaderBuilder):
        def schema(self) -> Any:
            return Struct(("x", np.int64))

        def setup(self, **kwargs: Any) -> None:
            kwargs["made"].append("setup")

        def new_reader(self, **kwargs: Any) -> Any:
            return values(2)

    piped = PipedReaderBuilder(Builder(), lambda reader, **_: ReaderWithLimit(reader, 1))
    builder = CompositeReaderBuilder(["a"], [piped])
    made: list[str] = []
    builder.setup(made=made)
    assert made == ["setup"] and builder.schema().field_names() == ["a:x"]
    assert isinstance(builder.new_reader()._readers[0], ReaderWithLimit)


@pytest.mark.parametrize(("threads", "instances"), [(1, 1), (3, 1), (1, 3)])
def test_records_go_through_a_queue(threads: int, instances: int) -> None:
    session = LocalSession()
    with TaskGroup(WorkspaceType.GLOBAL) as init, Task():
        total = ops.Const([0])
        mutex = ops.CreateMutex([])
    session.run(init)

    def add(record: Any) -> None:
        ops.AtomicFetchAdd([mutex, total, record.x()], [total, ops.net().NextName("before")])

    with TaskGroup() as group:
        queue = pipe(values(20), num_threads=threads, num_runtime_threads=instances, capacity=2)
        pipe(queue, num_threads=threads, num_runtime_threads=instances, processor=add)
    session.run(group)
    assert workspace.FetchBlob(total).tolist() == [190]
    assert queue.num_readers() == queue.num_writers() == threads


def test_a_net_as_processor() -> None:
    net = core.Net("double")
    record = NewRecord(net, Struct(("x", np.int64)))
    net.set_input_record(record)
    net.set_output_record(Struct(("twice", net.Add([record.x(), record.x()]))))
    processor = NetProcessor(net, name="double")
    reader = pipe(values(4), processor=processor, num_threads=0)
    assert total_of(reader, "twice") == (12, None)
    assert processor.blob_maps()[0][str(record.x())] != str(record.x())


@pytest.mark.parametrize(("limit", "stop_at", "expected"), [(9, 3, 6), (2, 3, 1)])
def test_a_processor_can_stop_the_reading(limit: int, stop_at: int, expected: int) -> None:
    """The record at which it stops counts; the limit of the reader still holds."""
    session = LocalSession()
    with TaskGroup(WorkspaceType.GLOBAL) as init, Task():
        total, last = ops.Const([0]), ops.Const([stop_at])
    session.run(init)

    def add(record: Any) -> Any:
        ops.Add([total, record.x()], [total])
        return None, None, ops.GE([record.x(), last])

    with TaskGroup(WorkspaceType.GLOBAL) as group:
        pipe(ReaderWithLimit(values(9), limit), processor=add)
    session.run(group)
    assert workspace.FetchBlob(total).tolist() == [expected]


def test_what_cannot_be_read_or_written() -> None:
    with pytest.raises(ValueError, match="Input must be a reader"), TaskGroup():
        pipe(object())
    with pytest.raises(ValueError, match="output must be"), TaskGroup():
        pipe(values(2), object(), name="p")
    with pytest.raises(NotImplementedError):
        Reader().read(core.Net("n"))
