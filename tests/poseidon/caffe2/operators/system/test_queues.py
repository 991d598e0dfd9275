"""Queues of blobs: order, limits, ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.net_builder import ops
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.task import Task, TaskGroup
from tests.support.caffe2_operators import call


def put(*values: Any, safe: bool = False) -> bool:
    names = [f"in{index}" for index in range(len(values))]
    for name, value in zip(names, values, strict=True):
        workspace.FeedBlob(name, np.array(value))
    call(
        "SafeEnqueueBlobs" if safe else "EnqueueBlobs", ["queue", *names], names + ["status"] * safe
    )
    return bool(safe and workspace.FetchBlob("status"))


def test_entries_come_out_in_order() -> None:
    call("CreateBlobsQueue", [], ["queue"], capacity=3, num_blobs=2)
    for number in range(3):
        put([number], [10.0 * number])
    for number in range(3):
        call("DequeueBlobs", ["queue"], ["a", "b"])
        assert workspace.FetchBlobs(["a", "b"]) == [[number], [10 * number]]


def test_several_entries_are_joined() -> None:
    call("CreateBlobsQueue", [], ["queue"], capacity=5)
    for values in ([1, 2], [3], [4]):
        put(values)
    call("CloseBlobsQueue", ["queue"], [])
    for expected in ([1, 2, 3], [4]):
        call("SafeDequeueBlobs", ["queue"], ["a", "status"], num_records=2)
        assert not workspace.FetchBlob("status")
        np.testing.assert_array_equal(workspace.FetchBlob("a"), expected)
    call("SafeDequeueBlobs", ["queue"], ["a", "status"], num_records=2)
    assert workspace.FetchBlob("status")


def test_a_closed_queue_gives_what_it_has_and_takes_nothing() -> None:
    call("CreateBlobsQueue", [], ["queue"], capacity=2)
    assert not put(1, safe=True)
    call("CloseBlobsQueue", ["queue"], [])
    assert put(2, safe=True)
    with pytest.raises(RuntimeError, match="queue is closed"):
        put(2)
    call("DequeueBlobs", ["queue"], ["a"])
    assert workspace.FetchBlob("a") == 1
    with pytest.raises(RuntimeError, match="queue is closed"):
        call("DequeueBlobs", ["queue"], ["a"])


def test_an_entry_keeps_its_values() -> None:
    call("CreateBlobsQueue", [], ["queue"])
    workspace.FeedBlob("n", np.array([3], np.int64))
    call("EnqueueBlobs", ["queue", "n"], ["n"])
    call("Iter", ["n"], ["n"])
    call("DequeueBlobs", ["queue"], ["a"])
    assert (workspace.FetchBlob("a"), workspace.FetchBlob("n")) == (3, 4)


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "arguments", "message"),
    [
        ("DequeueBlobs", ["queue"], ["a"], {"timeout_secs": 0.01}, "timed out in 0.0"),
        ("DequeueBlobs", ["queue"], ["a", "b"], {}, "has 1 blobs, 2 are given"),
        ("DequeueBlobs", ["x"], ["a"], {}, "is not a queue"),
        ("EnqueueBlobs", ["queue", "x", "x"], ["x", "x"], {}, "has 1 blobs, 2 are given"),
        ("CreateBlobsQueue", [], ["other"], {"capacity": 0}, "at least 1, not 0"),
    ],
)
def test_wrong_inputs_of_queues_are_refused(
    kind: str, inputs: list[str], outputs: list[str], arguments: Any, message: str
) -> None:
    call("CreateBlobsQueue", [], ["queue"])
    workspace.FeedBlob("x", np.zeros(1))
    with pytest.raises(RuntimeError, match=message):
        call(kind, inputs, outputs, **arguments)


def test_queues_are_drawn_by_weight() -> None:
    for name in ("queue", "second"):
        call("CreateBlobsQueue", [], [name], capacity=9, num_blobs=2)
    workspace.FeedBlob("x", np.zeros(1))
    for name in ["queue", "second"] * 3:
        call("EnqueueBlobs", [name, "x", "x"], ["x", "x"])
    arguments = {"weights": [1e-9, 1.0], "table_idx_blob": 1}
    for _ in range(3):
        outputs = ["a", "number", "status"]
        call("WeightedSampleDequeueBlobs", ["queue", "second"], outputs, **arguments)
        assert workspace.FetchBlobs(["number", "status"]) == [[1], False]
    call("CloseBlobsQueue", ["second"], [])
    call("WeightedSampleDequeueBlobs", ["queue", "second"], ["a", "number", "status"], **arguments)
    assert workspace.FetchBlob("status")
    with pytest.raises(RuntimeError, match="weights must be positive"):
        call("WeightedSampleDequeueBlobs", ["queue"], ["a", "b", "status"], weights=[0.0])


def test_tasks_pass_entries_on() -> None:
    """A full queue makes the writer wait, an empty one the reader; the end of the writer ends
    the reader.
    """
    workspace.FeedBlob("total", np.array(0))
    call("CreateBlobsQueue", [], ["queue"], capacity=2)
    with TaskGroup() as group:
        with Task():
            with ops.loop(20) as loop:
                ops.EnqueueBlobs(["queue", loop.iter()], [loop.iter()])
            ops.CloseBlobsQueue(["queue"], 0)
        with Task(), ops.loop():
            value, status = ops.SafeDequeueBlobs(["queue"], 2)
            ops.stop_if(status)
            ops.Add(["total", value], ["total"])
    workspace.RunPlan(core.Plan(group.to_task().get_step()))
    assert workspace.FetchBlob("total") == sum(range(20))


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_a_failure_ends_the_waits_of_the_other_parts(kind: str) -> None:
    call("CreateBlobsQueue", [], ["queue"])
    workspace.FeedBlob("no", np.array(False))
    waits, fails = core.Net("waits"), core.Net("fails")
    waits.Proto().type, waits.Proto().num_workers = kind, 2
    waits.DequeueBlobs(["queue"], ["a"])
    waits.Copy("no", "b")
    fails.Assert(["no"], [], error_msg="the cause")
    step = core.execution_step(
        "both",
        [core.execution_step("w", waits), core.execution_step("f", fails)],
        concurrent_substeps=True,
    )
    with pytest.raises(RuntimeError, match="the cause"):
        workspace.RunPlan(step)


def test_a_rebatching_queue_joins_examples_anew() -> None:
    call("CreateRebatchingQueue", [], ["queue"], capacity=9, num_blobs=2)
    workspace.FeedBlob("x", np.arange(6).reshape(3, 2))
    workspace.FeedBlob("s", np.array([b"a", b"b", b"c"], dtype=object))
    for _ in range(2):
        call("EnqueueRebatchingQueue", ["queue", "x", "s"], [], enqueue_batch=1)
    for expected in ([0, 2, 4, 0], [2, 4]):
        if len(expected) < 4:
            call("CloseRebatchingQueue", ["queue"], [])
        call("DequeueRebatchingQueue", ["queue"], ["y", "t"], num_elements=4)
        np.testing.assert_array_equal(workspace.FetchBlob("y")[:, 0], expected)
        assert len(workspace.FetchBlob("t")) == len(expected)
    with pytest.raises(RuntimeError, match="closed"):
        call("DequeueRebatchingQueue", ["queue"], ["y", "t"])
    with pytest.raises(RuntimeError, match="closed"):
        call("EnqueueRebatchingQueue", ["queue", "x", "s"], [])


def test_a_single_example_keeps_its_shape() -> None:
    call("CreateRebatchingQueue", [], ["queue"], capacity=1)
    workspace.FeedBlob("x", np.arange(2))
    call("EnqueueRebatchingQueue", ["queue", "x"], [])
    call("DequeueRebatchingQueue", ["queue"], ["y"])
    np.testing.assert_array_equal(workspace.FetchBlob("y"), [[0, 1]])


@pytest.mark.parametrize("tensor", [False, True])
def test_a_queue_is_read_as_a_database(tensor: bool) -> None:
    call("CreateBlobsQueue", [], ["queue"], capacity=4)
    for number in range(4):
        record = caffe2_pb2.TensorProtos()
        record.protos.add(data_type=caffe2_pb2.TensorProto.INT32, int32_data=[number])
        text = record.SerializeToString()
        workspace.FeedBlob("in", np.array([text], dtype=object) if tensor else text)
        call("EnqueueBlobs", ["queue", "in"], ["in"])
    call("CreateBlobsQueueDB", ["queue"], ["reader"], timeout_secs=0.01)
    for expected in ([0, 1], [2, 3]):
        call("TensorProtosDBInput", ["reader"], ["label"], batch_size=2)
        np.testing.assert_array_equal(workspace.FetchBlob("label").reshape(-1), expected)
    with pytest.raises(RuntimeError, match="timed out"):
        call("TensorProtosDBInput", ["reader"], ["label"], batch_size=2)
    call("CloseBlobsQueue", ["queue"], [])
    with pytest.raises(RuntimeError, match="queue is closed"):
        call("TensorProtosDBInput", ["reader"], ["label"], batch_size=2)
