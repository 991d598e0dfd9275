"""Queues of records between tasks."""

from __future__ import annotations

import logging
from typing import Any

from poseidon.caffe2 import core, dataio
from poseidon.caffe2.task import TaskGroup

logger = logging.getLogger(__name__)


class _QueueReader(dataio.Reader):
    """Takes records from a queue, several at once where `num_dequeue_records` is more than 1."""

    def __init__(self, wrapper: Queue, num_dequeue_records: int = 1) -> None:
        assert wrapper._schema is not None, "Queue needs a schema in order to be read from."
        super().__init__(wrapper.schema())
        self._wrapper = wrapper
        self._num_dequeue_records = num_dequeue_records

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        """See `Reader`: behind the task the queue is closed."""
        finish_net.CloseBlobsQueue([self._wrapper.queue()], 0)

    def read_ex(self, local_init_net: Any, local_finish_net: Any) -> tuple[list[Any], Any, Any]:
        """See `Reader`: the end is where the queue is closed and empty."""
        self._wrapper._new_reader(local_init_net)
        net = core.Net("dequeue")
        fields, status = dequeue(
            net,
            self._wrapper.queue(),
            len(self.schema().field_names()),
            field_names=self.schema().field_names(),
            num_records=self._num_dequeue_records,
        )
        return [net], status, fields

    def read(self, read_net: Any) -> tuple[Any, Any]:
        net, status, fields = self.read_ex(read_net, None)
        read_net.AppendNet(net[0])
        return status, fields


class _QueueWriter(dataio.Writer):
    def __init__(self, wrapper: Queue) -> None:
        self._wrapper = wrapper

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        """See `Writer`: behind the task the queue is closed."""
        finish_net.CloseBlobsQueue([self._wrapper.queue()], 0)

    def write_ex(
        self, fields: Any, local_init_net: Any, local_finish_net: Any, stop_blob: Any
    ) -> list[Any]:
        """See `Writer`: nothing more can be written where the queue is closed."""
        self._wrapper._new_writer(self.schema(), local_init_net)
        net = core.Net("enqueue")
        enqueue(net, self._wrapper.queue(), fields, stop_blob)
        return [net]


class Queue(dataio.Pipe):
    """A queue that is made before the tasks of its group."""

    def __init__(
        self, capacity: int, schema: Any = None, name: str = "queue", num_dequeue_records: int = 1
    ) -> None:
        """Describe a queue.

        Args:
            capacity: records that it holds at most.
            schema: of the records; by default the first writer's.
            name: of its blob.
            num_dequeue_records: records that a reader takes at once.
        """
        super().__init__(schema, TaskGroup.LOCAL_SETUP)
        net = core.Net(name)
        self._queue = net.AddExternalInput(net.NextName(name))
        self._capacity = capacity
        self._num_dequeue_records = num_dequeue_records

    def setup(self, global_init_net: Any) -> None:
        """Add to a net the operator that makes the queue, once.

        Raises:
            AssertionError: the schema is not known.
        """
        assert self._schema is not None, "This queue does not have a schema."
        global_init_net.CreateBlobsQueue(
            [],
            [self._queue],
            capacity=self._capacity,
            num_blobs=len(self._schema.field_names()),
            field_names=self._schema.field_names(),
        )

    def queue(self) -> Any:
        return self._queue

    def reader(self) -> _QueueReader:
        return _QueueReader(self, self._num_dequeue_records)

    def writer(self) -> _QueueWriter:
        return _QueueWriter(self)


def enqueue(net: Any, queue: Any, data_blobs: Any, status: Any = None) -> Any:
    """Add the operator that enqueues blobs to a net; return the blob that tells it is closed.

    The operator moves its blobs: one that is given twice is copied.
    """
    status = net.NextName("status") if status is None else status
    blobs: list[Any] = []
    for blob in data_blobs:
        if blob in blobs:
            logger.warning("Need to copy blob %s to enqueue", blob)
            blob = net.Copy(blob)
        blobs.append(blob)
    return net.SafeEnqueueBlobs([queue, *blobs], [*blobs, status])[-1]


def dequeue(
    net: Any,
    queue: Any,
    num_blobs: int,
    status: Any = None,
    field_names: Any = None,
    num_records: int = 1,
) -> tuple[list[Any], Any]:
    """Add to a net the operator that takes blobs from a queue.

    Returns:
        the blobs, and the blob that is true where the queue is closed and empty.
    """
    if field_names is not None:
        assert len(field_names) == num_blobs
        names = [net.NextName(name) for name in field_names]
    else:
        names = [net.NextName("data", index) for index in range(num_blobs)]
    status = net.NextName("status") if status is None else status
    *fields, status = net.SafeDequeueBlobs(queue, [*names, status], num_records=num_records)
    return fields, status


def close_queue(step: Any, *queues: Any) -> Any:
    """Return a step that closes queues behind another step."""
    close_net = core.Net("close_queue_net")
    for queue in queues:
        close_net.CloseBlobsQueue([queue], 0)
    close = core.execution_step(f"{step}_close", close_net)
    return core.execution_step(f"{step}_step", [step, close])
