"""The bases of readers and writers, which add operators that read or write a batch of records."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.schema import Field, from_blob_list


class Reader:
    """The base of readers: an implementation has `read`, and `reset` where it can begin again."""

    def __init__(self, schema: Field | None = None) -> None:
        assert schema is None or isinstance(schema, Field)
        self._schema = schema

    def schema(self) -> Field:
        """Return the schema of the records.

        Raises:
            AssertionError: it is not known.
        """
        assert self._schema is not None, "Schema not provided for this reader."
        return self._schema

    def _set_schema(self, schema: Field | None) -> None:
        self._schema = schema

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        """Add to two nets what runs before and after the task that reads."""

    def read_ex(self, local_init_net: Any, local_finish_net: Any) -> tuple[list[Any], Any, Any]:
        """Return the nets that read a batch, the blob that tells the end, and the batch's blobs.

        Args:
            local_init_net, local_finish_net: nets that run before and after each of the threads.
        """
        net = core.Net("reader_body")
        return ([net], *self.read(net))

    def read_record_ex(
        self, local_init_net: Any, local_finish_net: Any
    ) -> tuple[list[Any], Any, Any]:
        """Return what `read_ex` does, with a record where the schema is known."""
        nets, should_stop, fields = self.read_ex(local_init_net, local_finish_net)
        return nets, should_stop, from_blob_list(self._schema, fields) if self._schema else fields

    def read(self, read_net: Any) -> tuple[Any, Any]:
        """Add operators that read a batch to a net; return the end's and the batch's blobs."""
        raise NotImplementedError("Readers must implement `read`.")

    def reset(self, net: Any) -> None:
        """Add to a net the operators that let the reader begin again."""
        raise NotImplementedError("This reader cannot be resetted.")

    def read_record(self, read_net: Any) -> tuple[Any, Any]:
        """Return what `read` does, with a record where the schema is known."""
        should_stop, fields = self.read(read_net)
        return should_stop, from_blob_list(self._schema, fields) if self._schema else fields

    def execution_step(
        self, reader_net_name: str | None = None, external_should_stop: Any = None
    ) -> tuple[Any, Any]:
        """Return a step that reads until the end of the data, and the record that it reads.

        Args:
            reader_net_name: the name of its net.
            external_should_stop: a blob that ends the step too.
        """
        net = core.Net(reader_net_name or "reader")
        should_stop, fields = self.read_record(net)
        if external_should_stop is not None:
            should_stop = net.Or([external_should_stop, should_stop])
        return core.execution_step(
            f"{reader_net_name}_step", net, should_stop_blob=should_stop
        ), fields


class Writer:
    """The base of writers: `write`, and `commit` where the end of the data is announced."""

    _schema: Field | None = None

    def schema(self) -> Field | None:
        """Return the schema of the records, None where it is not known."""
        return self._schema

    def write(self, writer_net: Any, fields: Any) -> None:
        """Add to a net the operators that write a batch, given by its blobs."""
        raise NotImplementedError("Writers must implement write.")

    def write_record(self, writer_net: Any, fields: Any) -> None:
        """Add to a net the operators that write a batch, given as a record."""
        self.write(writer_net, self._blobs(fields))

    def _blobs(self, fields: Any) -> Any:
        if isinstance(fields, Field):
            self._schema = fields
            return fields.field_blobs()
        return fields

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        """Add to two nets what runs before and after the task that writes."""
        self.commit(finish_net)

    def write_ex(
        self, fields: Any, local_init_net: Any, local_finish_net: Any, stop_blob: Any
    ) -> list[Any]:
        """Return the nets that write a batch.

        Args:
            fields: its blobs.
            local_init_net, local_finish_net: nets that run before and after each of the threads.
            stop_blob: a boolean that becomes true where nothing more can be written.
        """
        net = core.Net("write_net")
        self.write(net, fields)
        return [net]

    def write_record_ex(
        self, fields: Any, local_init_net: Any, local_finish_net: Any, stop_blob: Any = None
    ) -> tuple[list[Any], Any]:
        """Return the nets that write a record, and the blob that is true when no more fits."""
        blobs = self._blobs(fields)
        if stop_blob is None:
            stop_blob = local_init_net.NextName("dequeue_status")
        return self.write_ex(blobs, local_init_net, local_finish_net, stop_blob), stop_blob

    def commit(self, finish_net: Any) -> None:
        """Add to a net the operators that announce the end of the data."""
