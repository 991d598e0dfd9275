"""Tables of a job's statistics.

Law: no I/O. Bytes are per iteration and client: the sum over all workers divided by the number of
workers that communicate. Times are milliseconds per iteration, the mean over the workers. `hidden`
is the fraction of communication that overlaps with computation: hidden / (hidden + waited). A
shard's columns are its load relative to the mean, its current and longest queue, the bytes of its
values and histories, and the peak memory of its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.base.text_files import aligned
from poseidon.errors import counted
from poseidon.observe.metrics.job_statistics import (
    GpuReading,
    JobStatistics,
    WorkerStatistics,
)
from ps_server.statistics import ShardStatistics

TENSOR_HEAD = ("tensor", "scheme", "bytes out", "bytes in", "waited ms", "hidden ms", "hidden")
SHARD_HEAD = (
    "shard",
    "bytes in",
    "bytes out",
    "of mean",
    "updates",
    "busy s",
    "queue",
    "longest",
    "values",
    "peak",
)
UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """A row of the table of tensors, per iteration.

    Attributes:
        bytes_out: the bytes sent per client; None: not counted.
        waited_s: the mean over the workers.
        hidden_s: the mean over the workers; None: not measured.
        held_back: the mean over the clients of the L2 norm of what a codec holds back now; None: no
            codec.
    """

    name: str
    scheme: str
    bytes_out: float | None
    bytes_in: float | None
    waited_s: float
    hidden_s: float | None
    held_back: float | None = None


def tensor_rows(workers: Sequence[WorkerStatistics]) -> list[TensorRow]:
    """Return a row for each tensor in the order of the net; an empty list before the end of the
    first iteration.
    """
    running = [worker for worker in workers if worker.iterations and worker.tensors]
    rows = []
    for index, tensor in enumerate(running[0].tensors if running else ()):
        seen = [
            (worker.tensors[index], worker.iterations)
            for worker in running
            if index < len(worker.tensors)
        ]
        hidden = [t.hidden_s / n for t, n in seen if t.hidden_s is not None]
        rows.append(
            TensorRow(
                name=tensor.name,
                scheme=tensor.scheme,
                bytes_out=_mean([t.bytes_out / n for t, n in seen if t.bytes_out is not None]),
                bytes_in=_mean([t.bytes_in / n for t, n in seen if t.bytes_in is not None]),
                waited_s=_mean([t.waited_s / n for t, n in seen]) or 0.0,
                hidden_s=_mean(hidden),
                held_back=_mean([t.held_back for t, _ in seen if t.held_back is not None]),
            )
        )
    return rows


def tensor_table(rows: Sequence[TensorRow]) -> list[str]:
    """Return the lines of the table of tensors (`tensor_rows`) with a total."""
    if not rows:
        return ["no iteration has ended yet"]
    return aligned([TENSOR_HEAD, *(_cells(row) for row in [*rows, _total(rows)])], left=2)


def held_back_table(rows: Sequence[TensorRow]) -> list[str]:
    """Return the lines of what codecs hold back; an empty list without codecs."""
    held_back = [(row.name, f"{row.held_back:.4g}") for row in rows if row.held_back is not None]
    return aligned([("tensor", "held back"), *held_back], left=1) if held_back else []


def shard_table(shards: Sequence[tuple[int, ShardStatistics]]) -> list[str]:
    """Return the lines of the table of shards; an empty list without shards."""
    if not shards:
        return []
    mean = sum(shard.bytes_in + shard.bytes_out for _, shard in shards) / len(shards)
    rows = [
        (
            str(index),
            f"{shard.bytes_in:,}",
            f"{shard.bytes_out:,}",
            f"{(shard.bytes_in + shard.bytes_out) / mean:.3f}" if mean else UNKNOWN,
            f"{shard.updates:,}",
            f"{shard.busy_s:.1f}",
            str(shard.queue),
            str(shard.longest_queue),
            f"{shard.memory_bytes:,}",
            f"{shard.peak_bytes:,}",
        )
        for index, shard in shards
    ]
    return aligned([SHARD_HEAD, *rows], left=0)


def value_table(values: Mapping[str, tuple[int, float | None]]) -> list[str]:
    """Return the lines of the last values of curves; an empty list without curves.

    Args:
        values: see `last_values`; None: not finite.
    """
    rows = [
        (name, f"{iteration:,}", UNKNOWN if value is None else f"{value:.6g}")
        for name, (iteration, value) in values.items()
    ]
    return (
        aligned([("last value of", "iteration", "mean over workers"), *rows], left=1)
        if rows
        else []
    )


def job_tables(statistics: JobStatistics) -> list[str]:
    """Return the lines that `poseidon stats` prints."""
    workers = list(statistics.workers.values())
    iterations = max((worker.iterations for worker in workers), default=0)
    lines = [
        f"job {statistics.job}: {counted(len(workers), 'worker')}, "
        f"{counted(iterations, 'iteration')}, {counted(len(statistics.shards), 'shard')}"
    ]
    lines += ["", "per iteration, a client:", *tensor_table(tensor_rows(workers))]
    if held_back := held_back_table(tensor_rows(workers)):
        lines += ["", "held back by codecs, L2 norm, the mean over clients:", *held_back]
    others = [worker.other_bytes_out + worker.other_bytes_in for worker in workers]
    if any(others):
        lines.append(
            f"other traffic: {sum(others):,} bytes in all, for joining, clocks, collections and "
            "snapshots"
        )
    if statistics.gpus:
        rows = [(str(rank), *gpu_cells(gpu)) for rank, gpu in statistics.gpus.items()]
        lines += ["", "GPUs:", *aligned([("worker", "memory", "busy", "temperature"), *rows])]
    table = shard_table(list(statistics.shards.items()))
    if not table:
        return lines
    return [
        *lines,
        "",
        "since the start, a shard:",
        *table,
        *rejections(list(statistics.shards.items())),
    ]


def gpu_cells(gpu: GpuReading) -> tuple[str, str, str]:
    """Return the memory, the busy part of the time and the temperature of a GPU."""
    memory = UNKNOWN
    if gpu.memory_bytes is not None and gpu.total_bytes is not None:
        memory = f"{gpu.memory_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB"
    busy = UNKNOWN if gpu.busy is None else f"{100 * gpu.busy:.0f} %"
    return memory, busy, UNKNOWN if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C"


def rejections(shards: Sequence[tuple[int, ShardStatistics]]) -> list[str]:
    """Return a line for each shard that has refused connections or dropped messages."""
    return [
        f"shard {index} refused {counted(shard.refused, 'connection')} and dropped "
        f"{counted(shard.dropped, 'message')}"
        for index, shard in shards
        if shard.refused or shard.dropped
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _total(rows: Sequence[TensorRow]) -> TensorRow:
    def total(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return TensorRow(
        name="total",
        scheme="",
        bytes_out=total([row.bytes_out for row in rows]),
        bytes_in=total([row.bytes_in for row in rows]),
        waited_s=sum(row.waited_s for row in rows),
        hidden_s=total([row.hidden_s for row in rows]),
    )


def _cells(row: TensorRow) -> tuple[str, ...]:
    def count(number: float | None) -> str:
        return UNKNOWN if number is None else f"{number:,.0f}"

    hidden, share = UNKNOWN, UNKNOWN
    if row.hidden_s is not None:
        hidden = f"{1000 * row.hidden_s:.2f}"
        communication_s = row.hidden_s + row.waited_s
        share = f"{100 * row.hidden_s / communication_s:.0f} %" if communication_s else UNKNOWN
    waited = f"{1000 * row.waited_s:.2f}"
    return (row.name, row.scheme, count(row.bytes_out), count(row.bytes_in), waited, hidden, share)
