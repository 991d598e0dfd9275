"""Real training jobs: `poseidon train` in a process, as a user starts it, or in the test's."""

from __future__ import annotations

import io
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import psutil

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.cli.main import main
from tests.support.databases import make_database, picture

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0


def make_data(folder: Path) -> None:
    """Make small databases of images whose brightness gives their label."""
    for name, count in (("train_lmdb", 130), ("test_lmdb", 60)):
        records = (
            (
                b"%05d" % i,
                encode_datum((picture(i, (3, 8, 8)) // 4 + 19 * (i % 10)).astype(np.uint8), i % 10),
            )
            for i in range(count)
        )
        make_database(folder / name, Backend.LMDB, records)


def machinefile(folder: Path, clients: int, shards: int | None = None) -> Path:
    """Write a machinefile of clients on this host, on free ports; with `shards`, only the first
    ones serve.
    """
    path = folder / f"hosts{clients}"
    serving = clients if shards is None else shards
    lines = [
        f"{client} 127.0.0.1 0{'' if client < serving else ' role=worker'}\n"
        for client in range(clients)
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def environment(folder: Path) -> dict[str, str]:
    """Return the environment with the test's own state folder."""
    return {**os.environ, "POSEIDON_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}


def command(*arguments: object) -> list[str]:
    """Return the command line of `poseidon` with arguments."""
    return [sys.executable, "-m", "poseidon", *map(str, arguments)]


def poseidon(
    folder: Path, *arguments: object, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in `folder`; it reads what is typed, by default what the test
    reads.
    """
    return subprocess.run(
        command(*arguments),
        input=typed,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def poseidon_here(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As `poseidon`, in the test's own process, which has imported torch; the processes of a job
    are true ones.
    """
    out, err = io.StringIO(), io.StringIO()
    words = [*map(str, arguments)]
    before = Path.cwd()
    with (
        mock.patch.dict(os.environ, environment(folder)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        os.chdir(folder)
        try:
            code = main(words)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


class Training:
    """A running job."""

    def __init__(self, folder: Path, name: str, arguments: tuple[object, ...]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            command(name, *arguments),
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, text: str) -> str:
        """Wait for the next line with `text`, and return it."""
        while True:
            line = self._queue.get(timeout=WAIT_S)
            assert line is not None, f"the job ended without '{text}':\n{''.join(self.lines)}"
            self.lines.append(line)
            if text in line:
                return line

    def end(self) -> int:
        """Wait for the exit code; `lines` then has the whole output."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        while not self._queue.empty():
            line = self._queue.get()
            self.lines.extend([line] if line is not None else [])
        return code

    def children(self) -> dict[str, psutil.Process]:
        """Return the job's processes by their names: `worker 0`, `shard 1`."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            argv = child.cmdline()
            for flag, role in (("--rank", "worker"), ("--shard", "shard")):
                if flag in argv:
                    found[f"{role} {argv[argv.index(flag) + 1]}"] = child
        return found

    def close(self) -> None:
        """Kill the processes that are left."""
        left = []
        if self.process.poll() is None:
            left = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGKILL)
        for process in left:
            if process.is_running():
                process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def training(folder: Path, *arguments: object, command: str = "train") -> Iterator[Training]:
    """Run `poseidon train`, or another command that starts a job, until the end of the block at
    the latest.
    """
    job = Training(folder, command, arguments)
    try:
        yield job
    finally:
        job.close()
