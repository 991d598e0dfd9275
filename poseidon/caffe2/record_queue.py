"""A queue of records that several threads fill from a reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.dataio import Reader, Writer
from poseidon.caffe2.schema import Field, Struct, from_column_list


class _QueueReader(Reader):
    def __init__(self, blobs_queue: Any, schema: Field, name: str | None = None) -> None:
        super().__init__(schema)
        self.blobs_queue = blobs_queue
        self.name = name or "queue_reader"

    def read(self, read_net: Any) -> tuple[Any, Any]:
        """See `Reader`: the end is where the queue is closed and empty."""
        with core.NameScope(read_net.NextName(self.name)):
            names = [*self.schema().field_names(), read_net.NextName("status")]
            *fields, status = read_net.SafeDequeueBlobs(self.blobs_queue, names)
        return status, fields


class _QueueWriter(Writer):
    def __init__(self, blobs_queue: Any, schema: Field) -> None:
        self.blobs_queue = blobs_queue
        self._schema = schema

    def write(self, writer_net: Any, fields: Any) -> Any:
        """See `Writer`: checks the batch against the schema; the blob is true at the end."""
        blobs = list(fields.field_blobs() if isinstance(fields, Field) else fields)
        assert self._schema is not None
        writer_net.CheckDatasetConsistency(blobs, [], fields=self._schema.field_names())
        status = writer_net.NextName("status")
        return writer_net.SafeEnqueueBlobs([self.blobs_queue, *blobs], [*blobs, status])[-1]


class RecordQueue:
    """A queue of records, made in the current workspace.

    Attributes:
        reader, writer: read from it, write to it.
        exit_step: closes it.
    """

    def __init__(
        self,
        fields: Any,
        name: str | None = None,
        capacity: int = 1,
        enforce_unique_name: bool = False,
        num_threads: int = 1,
    ) -> None:
        """Make a queue.

        Args:
            fields: a record, or the names of columns.
            name: of the queue.
            capacity: records that it holds at most.
            enforce_unique_name: whether a second queue of its name is an error.
            num_threads: threads that fill it.
        """
        assert isinstance(fields, (list, Struct)), "fields must be a Struct or a list of names"
        self.schema = from_column_list(fields) if isinstance(fields, list) else fields
        self.name = name or "queue"
        self.num_threads = num_threads
        init_net = core.Net(f"{self.name}/init_net")
        self.blobs_queue = init_net.CreateBlobsQueue(
            [],
            1,
            capacity=capacity,
            num_blobs=len(self.schema.field_names()),
            enforce_unique_name=enforce_unique_name,
        )
        workspace.RunNetOnce(init_net)
        self.writer = _QueueWriter(self.blobs_queue, self.schema)
        self.reader = _QueueReader(self.blobs_queue, self.schema, f"{self.name}_reader")
        exit_net = core.Net(f"{self.name}/exit_net")
        exit_net.CloseBlobsQueue(self.blobs_queue, 0)
        self.exit_step = core.execution_step(f"{exit_net}_close_step", exit_net)

    def build(
        self, reader: Reader, process: Callable[[Any, Any], Any] | None = None
    ) -> tuple[Reader, Any, Any, Any]:
        """Return the queue's reader, the steps that fill and close it, and the schema.

        Args:
            reader: where the records come from.
            process: called with a net and a record, it adds operators and returns another record.
        """
        steps = []
        for number in range(self.num_threads):
            read_net, write_net = core.Net(f"reader_{number}"), core.Net(f"queue_writer_{number}")
            should_stop, fields = reader.read_record(read_net)
            self.writer.write(write_net, process(write_net, fields) if process else fields)
            parts = [core.execution_step(str(net), net) for net in (read_net, write_net)]
            step = core.execution_step(f"producer_{number}", parts, should_stop_blob=should_stop)
            steps.append(step)
        filling = core.execution_step("producers", steps, concurrent_substeps=True)
        return self.reader, filling, self.exit_step, self.schema
