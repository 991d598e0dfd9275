"""Pipelines: tasks that read records, process them, and write them, on several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poseidon.caffe2 import core, queue_util
from poseidon.caffe2.dataio import Reader, Writer
from poseidon.caffe2.net_builder import NetBuilder, ops
from poseidon.caffe2.schema import Field, as_record
from poseidon.caffe2.task import Task, TaskGroup

DEFAULT_QUEUE_CAPACITY = 100


class Output:
    """What a processor makes: nets, a record, and a blob that ends the reading.

    Without nets these are the operators that it has added with `ops`.
    """

    def __init__(self, nets: Any = None, record: Any = None, should_stop: Any = None) -> None:
        built = NetBuilder.current().get()
        assert nets is None or not built, "Cannot both use `ops` syntax and return a list of nets."
        made = built if nets is None else nets
        self.nets: list[Any] = [made] if isinstance(made, core.Net) else list(made)
        self.record = None if record is None else as_record(record)
        self.should_stop = should_stop


def _init_output(
    output: Any, capacity: int | None, global_init_net: Any, global_exit_net: Any
) -> tuple[Any, Any]:
    """Return the queue that is written to, None for a writer, and the writer."""
    queue: Any = None
    if output is None:
        queue = queue_util.Queue(capacity=DEFAULT_QUEUE_CAPACITY if capacity is None else capacity)
        writer = queue.writer()
    else:
        assert capacity is None, "capacity would not be used."
        if not isinstance(output, Writer) and not hasattr(output, "writer"):
            raise ValueError("output must be a reader, queue or stream.")
        queue = None if isinstance(output, Writer) else output
        writer = output if queue is None else queue.writer()
    writer.setup_ex(global_init_net, global_exit_net)
    return queue, writer


def make_processor(processor: Any, reader: Any = None) -> Callable[[Any], Any]:
    """Return a processor as a function of a record: a net is copied, None changes nothing."""
    if processor is None:
        return lambda record: record
    if isinstance(processor, core.Net):
        return NetProcessor(processor)
    return processor  # type: ignore[no-any-return]


def normalize_processor_output(output: Any) -> Output:
    """Return what a processor has returned as an `Output`.

    Args:
        output: an `Output`, a record, (record, stop blob), (nets, record, stop blob), nets, None.
    """
    if isinstance(output, Output):
        return output
    if isinstance(output, Field):
        return Output(record=output)
    if isinstance(output, tuple):
        if (
            len(output) == 2
            and isinstance(output[0], Field)
            and isinstance(output[1], core.BlobReference)
        ):
            return Output(None, *output)
        return Output(*output)
    return Output(output)


def pipe(
    input: Any,  # noqa: A002 (Caffe2's name)
    output: Any = None,
    num_threads: int = 1,
    processor: Any = None,
    name: str | None = None,
    capacity: int | None = None,
    group: Any = None,
    num_runtime_threads: int = 1,
) -> Any:
    """Make a task that reads to the end, processes and writes; return what it writes to.

    Args:
        input: a reader, or what has one (a queue).
        output: a writer, or what has one; by default a new queue, where there is anything to write.
        num_threads: the copies of the nets, each on a thread. With 0 there is no task: the reader,
            with the processor behind it, is returned.
        processor: a function of a record that returns one, or a net with input and output records.
        name: of the task.
        capacity: of the new queue, in records.
        group: of the task, in place of the current one.
        num_runtime_threads: instances of the task, which share its nets.
    """
    more = (name, capacity, group, num_runtime_threads)
    return _pipe_step(input, output, num_threads, processor, *more, None)[0]


def pipe_and_output(
    input: Any,  # noqa: A002
    output: Any = None,
    num_threads: int = 1,
    processor: Any = None,
    name: str | None = None,
    capacity: int | None = None,
    group: Any = None,
    num_runtime_threads: int = 1,
    final_outputs: Any = None,
) -> tuple[Any, Any]:
    """Do what `pipe` does; return also the task's outputs, as `final_outputs` names them."""
    assert num_threads > 0
    more = (name, capacity, group, num_runtime_threads)
    made, task = _pipe_step(input, output, num_threads, processor, *more, final_outputs)
    if final_outputs is None:
        return made, None
    outputs = task.outputs()
    return made, outputs if isinstance(final_outputs, (list, tuple)) else outputs[0]


def processor_name(processor: Any) -> str:
    """Return the name of a task for its processor: its own name, or its class's."""
    if hasattr(processor, "name"):
        return processor.name  # type: ignore[no-any-return]
    if getattr(processor, "__name__", None) == "<lambda>":
        return processor.__module__  # type: ignore[no-any-return]
    return type(processor).__name__


def _pipe_step(
    source: Any,
    output: Any,
    num_threads: int,
    processor: Any,
    name: str | None,
    capacity: int | None,
    group: Any,
    num_runtime_threads: int,
    final_outputs: Any,
) -> tuple[Any, Any]:
    if not isinstance(source, Reader) and not hasattr(source, "reader"):
        raise ValueError(f"Input must be a reader, queue or stream. Got {type(source).__name__}")
    reader = source if isinstance(source, Reader) else source.reader()
    if processor is not None:
        reader = ProcessingReader(reader, processor)
    if num_threads == 0 or num_runtime_threads == 0:
        assert output is None
        return reader, None
    if name is None:
        prefix = (
            "" if processor is not None else "pipe_into:" if output is not None else "pipe_from:"
        )
        name = prefix + processor_name(
            next(part for part in (processor, output, source) if part is not None)
        )
    with Task(
        name=name, group=group, outputs=final_outputs, num_instances=num_runtime_threads
    ) as task:
        parts = _Parts(task, reader, output, capacity)
        if num_runtime_threads > 1:
            assert num_threads == 1, "num_threads and num_runtime_threads exclude each other"
            parts.add_instances()
        else:
            parts.add_threads(num_threads)
    return parts.queue, task


class _Parts:
    """The nets of a task that reads, processes and writes."""

    def __init__(self, task: Any, reader: Any, output: Any, capacity: int | None) -> None:
        self.task, self.reader, self.output, self.capacity = task, reader, output, capacity
        self.init_net, self.exit_net = core.Net("init"), core.Net("exit")
        self.queue: Any = None
        self.writer: Any = None
        reader.setup_ex(self.init_net, self.exit_net)

    def add_threads(self, count: int) -> None:
        """Add so many copies of the nets, which run at the same time."""
        steps = []
        for number in range(count):
            with NetBuilder(name=f"t:{number}") as builder:
                before, body, after = self._thread()
                for part in (before, body, after):
                    ops.net(part)
            steps.append(core.to_execution_step(builder))
        ops.net(self.init_net)
        ops.net(core.execution_step("body", steps, concurrent_substeps=True))
        ops.net(self.exit_net)

    def add_instances(self) -> None:
        """Add the nets of one thread, which all instances of the task run."""
        before, body, after = self._thread()
        with ops.task_init():
            ops.net(self.init_net)
        with ops.task_instance_init():
            ops.net(before)
        ops.net(body)
        with ops.task_instance_exit():
            ops.net(after)
        with ops.task_exit():
            ops.net(self.exit_net)

    def _thread(self) -> tuple[Any, Any, Any]:
        """Return what a thread runs first, until the end of the data, and last."""
        init, exit_ = core.Net("init"), core.Net("exit")
        read, status, record = self.reader.read_record_ex(init, exit_)
        write: list[Any] = []
        if record is not None:
            if self.writer is None:
                # the queue belongs to the task, not to the thread
                with NetBuilder(_fullname=self.task.name):
                    self.queue, self.writer = _init_output(
                        self.output, self.capacity, self.init_net, self.exit_net
                    )
            write, _ = self.writer.write_record_ex(record, init, exit_, status)
        return init, core.execution_step("body", [*read, *write], should_stop_blob=status), exit_


class ProcessingReader(Reader):
    """Reads records of another reader through a processor."""

    def __init__(self, reader: Reader, processor: Any) -> None:
        super().__init__()
        self.reader = reader
        self.processor = make_processor(processor, reader)

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        self.reader.setup_ex(init_net, finish_net)

    def read_ex(self, init_net: Any, exit_net: Any) -> tuple[list[Any], Any, Any]:
        nets, status, record = self.reader.read_record_ex(init_net, exit_net)
        with NetBuilder(_stop_blob=status):
            result = normalize_processor_output(self.processor(record))
        nets = [*nets, *result.nets]
        if result.should_stop is not None:
            stop_net = core.Net("stop_net")
            stop_net.Or([status, result.should_stop], [status])
            nets.append(stop_net)
        if hasattr(self.processor, "setup"):
            init_net.add_attribute(TaskGroup.LOCAL_SETUP, self.processor)
        self._set_schema(result.record)
        return nets, status, result.record.field_blobs() if result.record else None


class NetProcessor:
    """A net with input and output records as a processor: each thread has a copy of it."""

    def __init__(
        self,
        net: Any,
        stop_signal: Any = None,
        thread_init_nets: Any = None,
        name: str | None = None,
    ) -> None:
        """Wrap a net.

        Args:
            net: with records.
            stop_signal: a blob of it that ends the reading.
            thread_init_nets: nets that run first, a copy for each thread.
            name: of the processor.
        """
        assert isinstance(net, core.Net)
        assert stop_signal is None or isinstance(stop_signal, core.BlobReference)
        self.name = name or str(net)
        self.thread_init_nets = thread_init_nets or []
        self.net = net
        self._stop_signal = stop_signal
        self._blob_maps: list[Any] = []
        self._frozen = False
        self._cloned_init_nets: list[Any] = []

    def setup(self, init_net: Any) -> list[Any]:
        """Return the copies of the nets that run first; no thread can be added from now on."""
        self._frozen = True
        cloned, self._cloned_init_nets = self._cloned_init_nets, []
        return cloned

    def __call__(self, rec: Any) -> Output:
        assert not self._frozen
        prefix = f"{NetBuilder.current().name}/"
        remap: dict[Any, Any] = {}
        for net in self.thread_init_nets:
            cloned, _ = core.clone_and_bind_net(net, str(net) + prefix, prefix, remap)
            self._cloned_init_nets.append(cloned)
        made, names = core.clone_and_bind_net(self.net, str(self.net) + prefix, prefix, remap, rec)
        stop = self._stop_signal
        if stop is not None and str(stop) in names:
            stop = core.BlobReference(names[str(stop)], net=made)
        self._blob_maps.append(names)
        return Output([made], made.output_record(), stop)

    def blob_maps(self) -> list[Any]:
        """Return the names in each copy by those in the net; no thread can be added from now on."""
        self._frozen = True
        return self._blob_maps
