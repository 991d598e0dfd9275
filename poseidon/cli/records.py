"""The commands that show what a job has written: logs, parse_log, stats, dashboard."""

from __future__ import annotations

import argparse
import io
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from poseidon.base.foreign_files import open_in
from poseidon.base.settings import read_settings
from poseidon.cli.entry import ctrl_c_ends_at_once
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.machinefile import HIGHEST_PORT, is_loopback
from poseidon.engine.snapshot_files import make_folder, write_atomically
from poseidon.errors import JobError, UsageError
from poseidon.launcher.job_folder import (
    OUTPUT,
    LogLines,
    find_training_log,
    is_running,
    job_folder,
    local_records,
    log_paths,
    read_records,
    read_training_log,
)
from poseidon.observe.metrics.glog_lines import merge_logs
from poseidon.observe.metrics.job_records import last_values
from poseidon.observe.metrics.job_statistics import FILE_NAME, encode_statistics, read_statistics
from poseidon.observe.metrics.statistics_tables import job_tables, value_table
from poseidon.observe.metrics.trace_iteration import merge, read_trace, trace_files, view_iteration
from poseidon.observe.metrics.training_log import as_csv

LOOK_S = 0.2


def run_logs(arguments: argparse.Namespace) -> int:
    """Print the lines."""
    if arguments.worker is not None and arguments.shard is not None:
        raise UsageError("give --worker or --shard, not both")
    if arguments.lines is not None and arguments.lines < 0:
        raise UsageError(f"--lines={arguments.lines}: expected 0 or more")
    folder = job_folder(arguments.job).resolve()
    with ExitStack() as stack:
        files = _open(folder, _chosen(folder, arguments), stack)
        lines = (_shown(name, line, len(files)) for name, line in merge_logs(files))
        for line in lines if arguments.lines is None else deque(lines, maxlen=arguments.lines):
            print(line)
        if arguments.follow:
            _follow(folder, arguments, files, stack)
    return 0


def _chosen(folder: Path, arguments: argparse.Namespace) -> Mapping[str, Path]:
    paths = log_paths(folder)
    asked = [
        f"{role} {number}"
        for role, number in (("worker", arguments.worker), ("shard", arguments.shard))
        if number is not None
    ]
    if asked and asked[0] not in paths:
        there = f"it has logs of {', '.join(paths)}" if paths else "it has none"
        raise JobError(f"{folder} holds no log of {asked[0]}; {there}")
    if not paths:
        raise JobError(f"{folder} holds no log of a worker or a shard")
    return {name: path for name, path in paths.items() if not asked or name in asked}


def _open(folder: Path, paths: Mapping[str, Path], stack: ExitStack) -> dict[str, LogLines]:
    def opened(path: Path) -> LogLines:
        file = open_in(folder, path.relative_to(folder))
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace")
        return LogLines(stack.enter_context(text))

    try:
        return {name: opened(path) for name, path in paths.items()}
    except OSError as error:
        raise JobError(f"cannot read {error.filename}: {error.strerror}") from error


def _follow(
    folder: Path, arguments: argparse.Namespace, files: dict[str, LogLines], stack: ExitStack
) -> None:
    runs = True
    while runs:
        runs = is_running(folder)
        if runs:
            time.sleep(LOOK_S)
        paths = _chosen(folder, arguments)
        files |= _open(folder, {name: paths[name] for name in paths if name not in files}, stack)
        for name, line in merge_logs(files):
            print(_shown(name, line, len(files)), flush=True)


def _shown(name: str, line: str, logs: int) -> str:
    return line if logs == 1 else f"{name}: {line}"


def run_stats(arguments: argparse.Namespace) -> int:
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


def run_dashboard(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    try:
        with ctrl_c_ends_at_once("poseidon dashboard"):
            from poseidon.observe.dashboard.serve import serve
    except ImportError as error:
        raise UsageError(
            f"the dashboard needs packages that are not installed ({error}): pip install "
            "'poseidon[dashboard]'"
        ) from error
    if not 0 <= arguments.port <= HIGHEST_PORT:
        raise UsageError(f"--port={arguments.port}: expected 0 (a free port) to {HIGHEST_PORT}")
    folders = [Path(folder) for folder in arguments.folders]
    if not folders:
        records = local_records(Registry(read_settings().state_folder))
        folders = [OUTPUT, *(Path(record.output) for record in records)]
    token = "" if is_loopback(arguments.host) else secrets.token_urlsafe(24)
    return serve(folders, host=arguments.host, port=arguments.port, token=token)


def run_parse_log(arguments: argparse.Namespace) -> int:
    """Write the tables that have rows; 0 when done."""
    if len(arguments.delimiter) != 1:
        raise UsageError(f"--delimiter is '{arguments.delimiter}'; expected one character")
    _, source = find_training_log(arguments.logfile_path)
    log = read_training_log(source)
    folder = arguments.output_dir or source.parent
    make_folder(folder)
    for ending, rows in (("train", log.train), ("test", log.test)):
        path = folder / f"{source.name}.{ending}"
        if rows:
            write_atomically(path, as_csv(rows, delimiter=arguments.delimiter).encode())
            print(f"Wrote {path}")
        elif arguments.verbose:
            print(f"Not writing {path}; no lines to write")
    return 0
