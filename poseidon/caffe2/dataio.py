"""Readers and writers: objects that add the operators that read or write batches of records.

What they add is safe in several threads. `queue_util` and `dataset` have implementations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import core
from poseidon.caffe2.schema import Field, Struct, equal_schemas, from_blob_list


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
        raise NotImplementedError("This reader cannot be reset")

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


__all__ = [
    "CompositeReader",
    "CompositeReaderBuilder",
    "CountUntil",
    "CounterReader",
    "Pipe",
    "PipedReaderBuilder",
    "Reader",
    "ReaderBuilder",
    "ReaderWithDelay",
    "ReaderWithLimit",
    "ReaderWithLimitBase",
    "ReaderWithTimeLimit",
    "Writer",
]


class ReaderBuilder:
    """The base of what makes the readers of several workers."""

    def schema(self) -> Any:
        raise NotImplementedError

    def setup(self, **kwargs: Any) -> Any:
        """Do once what comes before the first `new_reader`."""
        raise NotImplementedError

    def new_reader(self, **kwargs: Any) -> Any:
        raise NotImplementedError


class PipedReaderBuilder(ReaderBuilder):
    """Makes the readers of another builder, each with a pipeline behind it."""

    def __init__(self, builder: ReaderBuilder, piper: Callable[..., Any]) -> None:
        """Wrap a builder.

        Args:
            builder: makes the readers.
            piper: called with `reader` and `new_reader`'s arguments; returns a reader or its owner.
        """
        self._builder = builder
        self._piper = piper

    def schema(self) -> Any:
        return self._builder.schema()

    def setup(self, **kwargs: Any) -> Any:
        """Set up the builder."""
        return self._builder.setup(**kwargs)

    def new_reader(self, **kwargs: Any) -> Any:
        """Return the end of a new pipeline."""
        output = self._piper(reader=self._builder.new_reader(**kwargs), **kwargs)
        return output if isinstance(output, Reader) else output.reader()


class Pipe:
    """The base of what has readers and writers, e.g. a queue."""

    def __init__(self, schema: Field | None = None, obj_key: str | None = None) -> None:
        """Make a pipe.

        Args:
            schema: of its records; by default the first writer's.
            obj_key: the attribute under which nets of its readers and writers name it.
        """
        self._num_writers = 0
        self._num_readers = 0
        self._schema = schema
        self._obj_key = obj_key

    def schema(self) -> Field | None:
        """Return the schema of the records, None where it is not known."""
        return self._schema

    def setup(self, global_init_net: Any) -> Any:
        """Add to a net what runs before readers and writers."""

    def reader(self) -> Any:
        raise NotImplementedError

    def writer(self) -> Any:
        raise NotImplementedError

    def num_readers(self) -> int:
        return self._num_readers

    def num_writers(self) -> int:
        return self._num_writers

    def _new_writer(self, writer_schema: Field | None, writer_init_net: Any) -> None:
        if writer_schema is not None and self._schema is None:
            self._schema = writer_schema
        self._num_writers += 1
        if self._obj_key is not None:
            writer_init_net.add_attribute(self._obj_key, self)

    def _new_reader(self, reader_init_net: Any) -> None:
        self._num_readers += 1
        if self._obj_key is not None:
            reader_init_net.add_attribute(self._obj_key, self)


class CounterReader(Reader):
    """Reads 0, 1, 2, ... without end."""

    def __init__(self) -> None:
        super().__init__(Struct(("iter", np.int64)))
        self.counter: Any = None
        self.should_stop: Any = None

    def setup_ex(self, global_init_net: Any, global_finish_net: Any) -> None:
        if self.counter is None:
            self.counter = global_init_net.CreateCounter([], init_count=0)
            self.should_stop = global_init_net.ConstantFill(
                [], shape=[], dtype=core.DataType.BOOL, value=False
            )

    def read_ex(self, local_init_net: Any, local_finish_net: Any) -> tuple[list[Any], Any, Any]:
        net = core.Net("limited_reader_counter")
        return [net], self.should_stop, [net.CountUp([self.counter], 1)]


class ReaderWithLimitBase(Reader):
    """The base of readers that stop early; `data_finished` tells the limit from the end."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader._schema)
        self.reader = reader
        self.net = core.Net("reader_with_limit")
        self._data_finished = self.net.AddExternalInput(self.net.NextName("data_finished"))
        self.should_stop: Any = None

    def setup_ex(self, global_init_net: Any, global_finish_net: Any) -> None:
        global_init_net.ConstantFill(
            [], [self._data_finished], shape=[], value=False, dtype=core.DataType.BOOL
        )
        self.reader.setup_ex(global_init_net, global_finish_net)
        self.setup_limiter(global_init_net, global_finish_net)

    def read_ex(self, local_init_net: Any, local_finish_net: Any) -> tuple[list[Any], Any, Any]:
        """See `Reader`: the limit is looked at first, then the other reader reads."""
        before = core.Net("limited_reader_condition")
        should_stop = self.check_limiter_condition(before)
        nets, finished, fields = self.reader.read_ex(local_init_net, local_finish_net)
        self._set_schema(self.reader._schema)
        behind = core.Net("limited_reader_post")
        # the step looks at its blob behind each net: the limit counted already
        behind.Copy(finished, should_stop)
        behind.Or([self._data_finished, finished], [self._data_finished])
        return [before, *nets, behind], should_stop, fields

    def setup_limiter(self, global_init_net: Any, global_finish_net: Any) -> None:
        """Add to two nets what the limit needs before and after the task."""
        raise NotImplementedError("Subclass must implement `setup_limiter`")

    def check_limiter_condition(self, stop_condition_net: Any) -> Any:
        """Add the operators that check the limit to a net; return the blob that is true at it."""
        raise NotImplementedError("Subclass must implement `check_limiter_condition`")

    def data_finished(self) -> Any:
        """Return the blob that is true, behind the task, where the other reader came to its end."""
        return self._data_finished


def _never(net: Any) -> Any:
    return net.ConstantFill([], 1, shape=[], value=False, dtype=core.DataType.BOOL)


class ReaderWithLimit(ReaderWithLimitBase):
    """Reads so many batches of another reader, or all where the number is None."""

    def __init__(self, reader: Reader, num_iter: int | None = 1) -> None:
        super().__init__(reader)
        self.num_iter = num_iter
        self.counter: Any = None
        if num_iter is not None:
            self.counter = self.net.AddExternalInput(self.net.NextName("counter"))

    def setup_limiter(self, global_init_net: Any, global_finish_net: Any) -> None:
        if self.num_iter is not None:
            global_init_net.CreateCounter([], [self.counter], init_count=int(self.num_iter))

    def check_limiter_condition(self, stop_condition_net: Any) -> Any:
        if self.num_iter is None:
            return _never(stop_condition_net)
        return stop_condition_net.CountDown([self.counter], 1)


def CountUntil(num_iter: int) -> ReaderWithLimit:
    """Return a reader of the integers below a number."""
    return ReaderWithLimit(CounterReader(), num_iter)


class ReaderWithTimeLimit(ReaderWithLimitBase):
    """Reads batches of another reader for so many seconds, or all where the time is None or 0."""

    def __init__(self, reader: Reader, duration: float | None = 0) -> None:
        super().__init__(reader)
        self.duration = duration
        self.timer: Any = None
        self.duration_ns_blob: Any = None

    def setup_limiter(self, global_init_net: Any, global_finish_net: Any) -> None:
        if self.duration:
            self.timer = global_init_net.TimerBegin([], counter_name="epoch_timer")
            start = global_init_net.TimerGet(self.timer)
            self.duration_ns_blob = global_init_net.ConstantFill(
                [start], value=int(self.duration * 1e9), dtype=core.DataType.INT64
            )
            global_finish_net.TimerEnd([self.timer], [])

    def check_limiter_condition(self, stop_condition_net: Any) -> Any:
        if not self.duration:
            return _never(stop_condition_net)
        elapsed = stop_condition_net.TimerGet(self.timer)
        return stop_condition_net.GE([elapsed, self.duration_ns_blob], 1)


class ReaderWithDelay(Reader):
    """Waits so many seconds before each batch of another reader, for tests."""

    def __init__(self, reader: Reader, delay: float) -> None:
        super().__init__(reader._schema)
        self.reader = reader
        self.delay = delay

    def setup_ex(self, global_init_net: Any, global_finish_net: Any) -> None:
        self.reader.setup_ex(global_init_net, global_finish_net)

    def read_ex(self, local_init_net: Any, local_finish_net: Any) -> tuple[list[Any], Any, Any]:
        net = core.Net("reader_body")
        net.Python(lambda *_: time.sleep(self.delay))([], [])
        return ([net], *self.reader.read(net))


class CompositeReader(Reader):
    """Reads from several readers at once; it stops where the first of them does."""

    def __init__(self, names: Sequence[str], readers: Sequence[Reader]) -> None:
        """Join readers.

        Args:
            names: the fields of the record, one for each reader.
            readers: readers whose schemas are known.
        """
        assert len(names) == len(readers)
        fields = [(name, reader.schema()) for name, reader in zip(names, readers, strict=True)]
        super().__init__(Struct(*fields))
        self._names = names
        self._readers = readers

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        for reader in self._readers:
            reader.setup_ex(init_net, finish_net)

    def read_ex(self, local_init_net: Any, local_finish_net: Any) -> tuple[list[Any], Any, Any]:
        stop = local_init_net.ConstantFill([], shape=[], dtype=core.DataType.BOOL, value=False)
        nets: list[Any] = []
        fields: list[Any] = []
        for name, reader in zip(self._names, self._readers, strict=True):
            parts, should_stop, record = reader.read_record_ex(local_init_net, local_finish_net)
            behind = core.Net(f"{name}_stop")
            behind.Copy(should_stop, stop)
            nets.extend([*parts, behind])
            fields.extend(record.field_blobs())
        return nets, stop, fields

    def reset(self, net: Any) -> None:
        for reader in self._readers:
            reader.reset(net)


class CompositeReaderBuilder(ReaderBuilder):
    """Makes readers that join the readers of several builders."""

    def __init__(self, names: Sequence[str], reader_builders: Sequence[ReaderBuilder]) -> None:
        """Join builders; see `CompositeReader`."""
        self._names = names
        self._reader_builders = reader_builders
        pairs = zip(names, reader_builders, strict=True)
        self._schema = Struct(*[(name, builder.schema()) for name, builder in pairs])

    def schema(self) -> Any:
        return self._schema

    def setup(self, **kwargs: Any) -> None:
        for builder in self._reader_builders:
            builder.setup(**kwargs)

    def new_reader(self, **kwargs: Any) -> CompositeReader:
        """See `ReaderBuilder`.

        Raises:
            ValueError: a builder makes neither a reader nor what has one.
        """
        readers = []
        for builder in self._reader_builders:
            made = builder.new_reader(**kwargs)
            if not isinstance(made, Reader):
                if not hasattr(made, "reader"):
                    raise ValueError("reader must be an instance of Reader or Pipe")
                made = made.reader()
            readers.append(made)
        joined = CompositeReader(self._names, readers)
        assert equal_schemas(joined.schema(), self._schema, check_field_types=False)
        return joined
