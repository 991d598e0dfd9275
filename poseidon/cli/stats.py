"""`poseidon stats`: what each tensor costs on its way, how loaded each shard is, and the last values
of the curves; for a running job or one that has ended.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.engine.snapshots.files import write_atomically
from poseidon.errors import JobError, UsageError
from poseidon.launcher.job_folder import job_folder, read_records
from poseidon.observe.metrics.job_records import last_values
from poseidon.observe.metrics.job_statistics import FILE_NAME, encode_statistics, read_statistics
from poseidon.observe.metrics.statistics_tables import job_tables, value_table
from poseidon.observe.metrics.trace_iteration import merge, read_trace, trace_files, view_iteration


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or put traces together."""
    folder = job_folder(arguments.job).resolve()
    if arguments.trace is not None:
        print(_merge(folder, arguments.trace))
        return 0
    if arguments.picture is not None:
        _draw(folder, arguments.picture, arguments.rank, arguments.iteration)
        return 0
    path = folder / FILE_NAME
    if not path.exists():
        raise JobError(f"{folder} holds no {FILE_NAME}: the job has written no statistics yet")
    statistics = read_statistics(path)
    if arguments.json:
        print(encode_statistics(statistics))
        return 0
    values = value_table(last_values(read_records(folder)))
    print("\n".join([*job_tables(statistics), *(["", *values] if values else [])]))
    return 0


def _draw(folder: Path, target: Path, rank: int, iteration: int | None) -> None:
    from poseidon.observe.metrics.curves import FORMATS  # they import matplotlib, which takes long
    from poseidon.observe.metrics.trace_picture import draw_iteration

    kind = target.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UsageError(f"--picture={target}: expected a name that ends in .{', .'.join(FORMATS)}")
    source = folder / f"trace_worker_{rank}.json"
    if source not in trace_files(folder):
        raise JobError(f"{folder} holds no trace of worker {rank}")
    view = view_iteration(read_trace(source), iteration)
    title = f"worker {rank}, iteration {view.iteration}: {view.length_ms:.1f} ms, and the next one"
    write_atomically(target, draw_iteration(view, title=title, kind=kind))
    print(f"{target}: {title}")


def _merge(folder: Path, target: Path) -> str:
    traces = trace_files(folder)
    if target.resolve() in {path.resolve() for path in traces}:
        raise JobError(f"--trace={target} is one of the job's own traces; name a different file")
    try:
        with target.open("w", encoding="utf-8") as stream:
            count = merge(traces, stream.write)
    except OSError as error:
        raise JobError(f"cannot write {target}: {error.strerror or error}") from error
    return f"{target}: {count:,} events of {len(traces)} processes; open it at ui.perfetto.dev or chrome://tracing"
