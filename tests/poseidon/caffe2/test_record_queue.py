"""Queues of records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.dataset import Dataset
from poseidon.caffe2.record_queue import RecordQueue
from poseidon.caffe2.schema import ConstRecord, Map, Scalar, Struct, from_blob_list


def test_all_records_come_through() -> None:
    """Eight threads copy the records of one data set into a queue, three take them into another."""
    schema = Struct(("pairs", Map(Scalar(np.int32), Scalar(np.float32))))
    arrays = [
        np.int32([1, 2, 3]),
        np.int32([11, 21, 22, 31, 32, 33]),
        np.float32([1, 2, 2, 3, 3, 3]),
    ]
    net = core.Net("init")
    content = ConstRecord(net, from_blob_list(schema, arrays))
    reader = Dataset(content, name="source").reader(net)
    target = Dataset(schema, name="target")
    target.init_empty(net)
    writer = target.writer(net)
    workspace.RunNetOnce(net)

    def copied(process_net: Any, record: Any) -> Any:
        return from_blob_list(record, [process_net.Copy(blob) for blob in record.field_blobs()])

    queue_reader, fill, close, found = RecordQueue(schema, num_threads=8).build(reader, copied)
    assert found.field_names() == schema.field_names()
    consumers = []
    for number in range(3):
        take, put = core.Net(f"take_{number}"), core.Net(f"put_{number}")
        should_stop, record = queue_reader.read_record(take)
        writer.write(put, record.field_blobs())
        steps = [core.execution_step(str(part), part) for part in (take, put)]
        consumers.append(
            core.execution_step(f"consumer_{number}", steps, should_stop_blob=should_stop)
        )
    plan = core.Plan("plan")
    parts = [
        core.execution_step("producer", [fill, close]),
        core.execution_step("consumers", consumers, concurrent_substeps=True),
    ]
    plan.AddStep(core.execution_step("work", parts, concurrent_substeps=True))
    workspace.RunPlan(plan)
    lengths, keys, values = workspace.FetchBlobs(target.get_blobs())
    assert sorted(lengths.tolist()) == [1, 2, 3]
    assert sorted(keys.tolist()) == [11, 21, 22, 31, 32, 33]
    assert sorted(values.tolist()) == [1, 2, 2, 3, 3, 3]
    for begin, count in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        assert set(values[begin : begin + count].tolist()) == {float(count)}


def test_columns_by_name_and_what_is_refused() -> None:
    queue = RecordQueue(["a", "b"], name="named", capacity=2)
    assert queue.schema.field_names() == ["a", "b"] and queue.name == "named"
    with pytest.raises(AssertionError, match="must be a Struct or a list"):
        RecordQueue("a")
