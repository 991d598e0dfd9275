"""`poseidon logs`: the logs of a job's processes as one, by time, while it runs or later."""

from __future__ import annotations

import argparse
import io
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from poseidon.base.foreign_files import open_in
from poseidon.errors import JobError, UsageError
from poseidon.launcher.job_folder import LogLines, is_running, job_folder, log_paths
from poseidon.observe.metrics.glog_lines import merge_logs

LOOK_S = 0.2


def run(arguments: argparse.Namespace) -> int:
    """Print the lines."""
    if arguments.worker is not None and arguments.shard is not None:
        raise UsageError("--worker and --shard are two processes; expected one of them")
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
