"""`poseidon logs`: what the processes of a job have said, in one order, while it runs or later.

poseidon logs                                               the job that was started last
poseidon logs cifar10_quick-20260105-204016-3f9a1c --follow
poseidon logs output/cifar10_quick-20260105-204016-3f9a1c --worker=3 --lines=20
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from poseidon.cluster.jobs.kill import live_process
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.jobs.this_host import readable_records
from poseidon.errors import JobError, UsageError
from poseidon.launch.job_folder import job_folder, log_paths
from poseidon.metrics.log_merge import merge_logs
from poseidon.settings import read_settings

LOOK_S = 0.2


def run(arguments: argparse.Namespace) -> int:
    """Print the lines.

    Raises:
        UsageError: two processes are asked for, or no number of lines.
        JobError: there is no such job, or it has no such log.
    """
    if arguments.worker is not None and arguments.shard is not None:
        raise UsageError("--worker and --shard are two processes; expected one of them")
    if arguments.lines is not None and arguments.lines < 0:
        raise UsageError(f"--lines={arguments.lines}: expected 0 or more")
    folder = job_folder(arguments.job)
    with ExitStack() as stack:
        files = _open(_chosen(folder, arguments), stack)
        lines = (_shown(name, line, len(files)) for name, line in merge_logs(files))
        for line in lines if arguments.lines is None else deque(lines, maxlen=arguments.lines):
            print(line)
        if arguments.follow:
            _follow(folder, files)
    return 0


def _chosen(folder: Path, arguments: argparse.Namespace) -> Mapping[str, Path]:
    paths = log_paths(folder)
    asked = [
        f"{role} {number}"
        for role, number in (("worker", arguments.worker), ("shard", arguments.shard))
        if number is not None
    ]
    if asked and asked[0] not in paths:
        there = f"it has those of {', '.join(paths)}" if paths else "it has none"
        raise JobError(f"{folder} holds no log of {asked[0]}; {there}")
    if not paths:
        raise JobError(f"{folder} holds no log of a worker or a shard")
    return {name: path for name, path in paths.items() if not asked or name in asked}


def _open(paths: Mapping[str, Path], stack: ExitStack) -> dict[str, _Lines]:
    def opened(path: Path) -> _Lines:
        return _Lines(stack.enter_context(path.open(encoding="utf-8", errors="replace")))

    try:
        return {name: opened(path) for name, path in paths.items()}
    except OSError as error:
        raise JobError(f"cannot read {error.filename}: {error.strerror}") from error


class _Lines:
    """The whole lines that a file has by now; going through it again gives those that have come since."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._part = ""

    def __iter__(self) -> Iterator[str]:
        for piece in self._file:
            self._part += piece
            if self._part.endswith("\n"):
                line, self._part = self._part[:-1], ""
                yield line


def _follow(folder: Path, files: Mapping[str, _Lines]) -> None:
    registry = Registry(read_settings().state_folder)
    runs = True
    while runs:
        runs = _runs(folder, registry)
        if runs:
            time.sleep(LOOK_S)
        for name, line in merge_logs(files):
            print(_shown(name, line, len(files)), flush=True)


def _runs(folder: Path, registry: Registry) -> bool:
    records = readable_records(registry, lambda _: None)  # what cannot be read was told at the start
    records = [record for record in records if _same(record.output, folder)]
    return any(live_process(record.launcher) is not None for record in records)


def _same(output: str, folder: Path) -> bool:
    return Path(output).resolve() == folder.resolve()


def _shown(name: str, line: str, logs: int) -> str:
    return line if logs == 1 else f"{name}: {line}"
