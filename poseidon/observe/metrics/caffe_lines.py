"""The log lines of the `caffe` tool's test and time commands, with exactly the same text.

    Use CPU.
    Running for 100 iterations.
    Batch 0, accuracy = 0.77
    Loss: 0.74817
    accuracy = 0.7491
    loss = 0.74817 (* 1 = 0.74817 loss)

         conv1	forward: 24.3 ms.
    Average Forward-Backward: 159.66 ms.

Law: no I/O; functions from values to lines. The source locations are taken from tools/caffe.cpp of
BVLC Caffe 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.observe.metrics.glog_lines import GlogLine, loss_suffix, number
from poseidon.observe.metrics.record import Output

_TOOL = "caffe.cpp"


def _line(text: str, line: int) -> GlogLine:
    return GlogLine(text=text, file=_TOOL, line=line)


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
    return _line("*** Benchmark begins ***", 374), _line(
        f"Testing for {iterations} iterations.", 375
    )


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
