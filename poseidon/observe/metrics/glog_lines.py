"""The lines of Caffe's log, with exactly the same text for the parsers of Caffe's logs.

    Solving CIFAR10_quick
    Iteration 0, Testing net (#0)
        Test net output #0: accuracy = 0.0926
        Test net output #1: loss = 2.30268 (* 1 = 2.30268 loss)
    Iteration 100, loss: 1.64066, time: 141.762
        Train net output #0: loss = 1.64066 (* 1 = 1.64066 loss)
    Iteration 100, lr = 0.001

Law: no I/O except in `GlogSink`; functions from records to lines. Numbers are formatted as by a C++
stream.

Merging of the logs of a job's processes by time.

Law: no I/O. A line without a time (a traceback) stays after the line before it. The lines of a
process keep their order, even if its clock is set back.

The log lines of the `caffe` tool's test and time commands, with exactly the same text.

    Use CPU.
    Running for 100 iterations.
    Batch 0, accuracy = 0.77
    Loss: 0.74817
    accuracy = 0.7491
    loss = 0.74817 (* 1 = 0.74817 loss)

         conv1  forward: 24.3 ms.
    Average Forward-Backward: 159.66 ms.

Law: no I/O; functions from values to lines. The source locations are taken from tools/caffe.cpp of
BVLC Caffe 1.0.
"""

from __future__ import annotations

import heapq
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from poseidon.base.glog import at
from poseidon.observe.metrics.record import Output, TestRecord, TrainRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GlogLine:
    """A line with its source location in Poseidon's version of Caffe."""

    text: str
    file: str
    line: int


def _line(text: str, line: int, file: str = "caffe.cpp") -> GlogLine:
    return GlogLine(text=text, file=file, line=line)


_solver, _net = partial(_line, file="solver.cpp"), partial(_line, file="net.cpp")


def number(value: float) -> str:
    """Format a number as `std::ostream << value`: six significant digits without trailing zeros.

    >>> number(0.00001), number(0.4592), number(1e6), number(123456.0)
    ('1e-05', '0.4592', '1e+06', '123456')
    """
    if math.isnan(value):
        return "-nan" if math.copysign(1.0, value) < 0 else "nan"
    return f"{value:g}"


def solving(net: str) -> GlogLine:
    """Return the line at the start of training, the time zero of Caffe's parsers."""
    return _solver(f"Solving {net}", 160)


def train(record: TrainRecord) -> tuple[GlogLine, ...]:
    """Return the lines of a displayed iteration: the loss, each output, the learning rate."""
    first = f"Iteration {record.iteration}, loss: {number(record.loss)}, time: {number(record.elapsed_s)}"
    return (
        _solver(first, 294),
        *_outputs("Train", record.outputs, line=318),
        _solver(f"Iteration {record.iteration}, lr = {number(record.rate)}", 403),
    )


def testing(iteration: int, net: int) -> GlogLine:
    """Return the line at the start of a test."""
    return _solver(f"Iteration {iteration}, Testing net (#{net})", 456)


def tested(record: TestRecord) -> tuple[GlogLine, ...]:
    """Return the lines at the end of a test: the loss with test_compute_loss, each output and
    before it its classes.
    """
    lines = [] if record.loss is None else [_solver(f"Test loss: {number(record.loss)}", 473)]
    for index, line in enumerate(_outputs("Test", record.outputs, line=486)):
        # As SSD's solver with show_per_class_result.
        for label, precision in record.classes[index] if record.classes else ():
            lines.append(_solver(f"class{label}: {number(precision)}", 541))
        lines.append(line)
    return tuple(lines)


def test_interrupted() -> GlogLine:
    return _solver("Test interrupted.", 457)


def last(record: TrainRecord) -> tuple[GlogLine, ...]:
    """Return the lines after the last iteration: the loss and, which Caffe leaves out, each output:
    the curves of the train net end where those of the test nets do.
    """
    text = f"Iteration {record.iteration}, loss = {number(record.loss)}, time: {number(record.elapsed_s)}"
    return _solver(text, 228), *_outputs("Train", record.outputs, line=318)


def done() -> GlogLine:
    """Return the line at the end of training."""
    return _solver("Optimization Done.", 233)


def snapshotting(model: str, state: str) -> tuple[GlogLine, GlogLine]:
    """Return the lines of a snapshot: the files of the model and of the solver state."""
    return (
        _solver(f"Snapshotting to {model}", 317),
        _solver(f"Snapshotting solver state to {state}", 324),
    )


def _debug_line(text: str, line: int) -> Callable[[str, str | int, float], GlogLine]:
    """Return the function of a debug_info line of layer, blob and mean absolute value."""
    return lambda layer, blob, mean: _net(f"{text.format(layer, blob)}: {number(mean)}", line)


forward_top = _debug_line("    [Forward] Layer {}, top blob {} data", 560)
forward_param = _debug_line("    [Forward] Layer {}, param blob {} data", 571)
backward_bottom = _debug_line("    [Backward] Layer {}, bottom blob {} diff", 587)
backward_param = _debug_line("    [Backward] Layer {}, param blob {} diff", 598)


def all_params(data_l1: float, data_l2: float, diff_l1: float, diff_l2: float) -> GlogLine:
    """Return the debug_info line of the norms over all learnable blobs."""
    text = (
        f"    [Backward] All net params (data, diff): L1 norm = ({number(data_l1)}, "
        f"{number(diff_l1)}); L2 norm = ({number(data_l2)}, {number(diff_l2)})"
    )
    return _net(text, 547)


def _outputs(phase: str, outputs: Sequence[Output], line: int) -> tuple[GlogLine, ...]:
    return tuple(
        _solver(
            f"    {phase} net output #{index}: {output.name} = "
            f"{number(output.value)}{loss_suffix(output)}",
            line,
        )
        for index, output in enumerate(outputs)
    )


def loss_suffix(output: Output) -> str:
    """Return the text after the value of an output with a loss weight; an empty string for other
    outputs.
    """
    if not output.loss_weight:
        return ""
    weighted = output.loss_weight * output.value
    return f" (* {number(output.loss_weight)} = {number(weighted)} loss)"


class GlogSink:
    """A `Sink` that logs records. `begin_test` logs the line at the start of a test.

    Args:
        logger: a logger configured by `poseidon.base.glog.setup`.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def write(self, *lines: GlogLine) -> None:
        """Log lines at level INFO."""
        for line in lines:
            self._logger.info("%s", line.text, extra=at(line.file, line.line))

    def begin_test(self, iteration: int, net: int) -> None:
        self.write(testing(iteration, net))

    def on_train(self, record: TrainRecord) -> None:
        self.write(*train(record))

    def on_test(self, record: TestRecord) -> None:
        self.write(*tested(record))

    def close(self) -> None:
        pass


# Severity, month and day, time: `I1126 20:40:16.731869 `. The year is missing.
_HEAD = re.compile(r"[IWEF](\d{4} \d\d:\d\d:\d\d\.\d{6}) ", re.ASCII)


def merge_logs(logs: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Yield the lines of all logs by time, each with the name of its process.

    Args:
        logs: the lines of each process, by its name.
    """
    streams = [_timed(number, name, lines) for number, (name, lines) in enumerate(logs.items())]
    for _, _, name, line in heapq.merge(*streams, key=lambda entry: entry[:2]):
        yield name, line


def _timed(number: int, name: str, lines: Iterable[str]) -> Iterator[tuple[str, int, str, str]]:
    latest = ""
    for line in lines:
        match = _HEAD.match(line)
        if match is not None:
            latest = max(latest, match[1])
        yield latest, number, name, line


def using(device: str, *, gpu_name: str = "") -> tuple[GlogLine, ...]:
    """Return the lines about the device.

    Args:
        device: `cpu` or `cuda:<n>`.
    """
    if device == "cpu":
        return (_line("Use CPU.", 284),)
    return (
        _line(f"Use GPU with device ID {device.partition(':')[2] or 0}", 275),
        _line(f"GPU device name: {gpu_name}", 279),
    )


def running(iterations: int) -> GlogLine:
    """Return the first line of a test."""
    return _line(f"Running for {iterations} iterations.", 290)


def interrupted(done: int, iterations: int) -> GlogLine:
    """Return the line before the results of a test or a measurement that was stopped early."""
    return _line(f"Interrupted: the means are of {done} of {iterations} iterations.", 299)


def batch_line(batch: int, output: Output) -> GlogLine:
    return _line(f"Batch {batch}, {output.name} = {number(output.value)}", 313)


def score_lines(loss: float, means: Sequence[Output]) -> tuple[GlogLine, ...]:
    """Return the last lines of a test: the mean loss and the mean of every output."""
    return (
        _line(f"Loss: {number(loss)}", 318),
        *(_line(f"{mean.name} = {number(mean.value)}{loss_suffix(mean)}", 330) for mean in means),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """The mean times of a layer in a pass, in milliseconds."""

    name: str
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetTime:
    """The mean times of a net in a pass, in milliseconds.

    Attributes:
        total_ms: the whole measurement, all iterations.
    """

    layers: tuple[LayerTime, ...]
    forward_ms: float
    backward_ms: float
    total_ms: float
    iterations: int


def performing_forward() -> GlogLine:
    """Return the line before the first pass, which is not measured."""
    return _line("Performing Forward", 360)


def performing_backward(initial_loss: float) -> tuple[GlogLine, GlogLine]:
    """Return the lines between forward and backward of the first pass."""
    return _line(f"Initial loss: {number(initial_loss)}", 365), _line("Performing Backward", 366)


def benchmark_begins(iterations: int) -> tuple[GlogLine, GlogLine]:
    """Return the lines before the first measured iteration."""
    testing = f"Testing for {iterations} iterations."
    return _line("*** Benchmark begins ***", 374), _line(testing, 375)


def iteration_time(iteration: int, elapsed_ms: float) -> GlogLine:
    """Return the line of a measured iteration, counted from 1."""
    return _line(f"Iteration: {iteration} forward-backward time: {number(elapsed_ms)} ms.", 403)


def benchmark_ends(times: NetTime) -> tuple[GlogLine, ...]:
    """Return the lines of all layers and the totals."""
    lines = [_line("Average time per layer: ", 406)]
    for layer in times.layers:
        lines.append(_line(f"{layer.name:>10}\tforward: {number(layer.forward_ms)} ms.", 409))
        lines.append(_line(f"{layer.name:>10}\tbackward: {number(layer.backward_ms)} ms.", 412))
    whole_ms = times.total_ms / times.iterations
    lines += [
        _line(f"Average Forward pass: {number(times.forward_ms)} ms.", 417),
        _line(f"Average Backward pass: {number(times.backward_ms)} ms.", 419),
        _line(f"Average Forward-Backward: {number(whole_ms)} ms.", 421),
        _line(f"Total Time: {number(times.total_ms)} ms.", 423),
        _line("*** Benchmark ends ***", 424),
    ]
    return tuple(lines)
