"""True training jobs, as a user starts them: `poseidon train` in a process of its own."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from poseidon.data.databases.kinds import Backend
from poseidon.data.datum import encode_datum
from tests.support.databases import make_database, picture

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0


def make_data(folder: Path) -> None:
    """Small databases of pictures whose brightness tells their label."""
    for name, count in (("train_lmdb", 130), ("test_lmdb", 60)):
        records = (
            (b"%05d" % i, encode_datum((picture(i, (3, 8, 8)) // 4 + 19 * (i % 10)).astype(np.uint8), i % 10))
            for i in range(count)
        )
        make_database(folder / name, Backend.LMDB, records)


def machinefile(folder: Path, clients: int, shards: int | None = None) -> Path:
    """So many clients on this machine, on free ports; with `shards`, only the first so many of them serve."""
    path = folder / f"hosts{clients}"
    serving = clients if shards is None else shards
    lines = [
        f"{client} 127.0.0.1 0{'' if client < serving else ' role=worker'}\n" for client in range(clients)
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def environment(folder: Path) -> dict[str, str]:
    """With a state folder of the test's own."""
    return {**os.environ, "POSEIDON_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}


def command(*words: object) -> list[str]:
    """`poseidon` with these words."""
    return [sys.executable, "-m", "poseidon", *map(str, words)]


def poseidon(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in `folder`."""
    return subprocess.run(
        command(*words),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


class Training:
    """A job that runs."""

    def __init__(self, folder: Path, name: str, words: tuple[object, ...]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            command(name, *words),
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, text: str) -> str:
        """The next line that holds `text`."""
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
        """The job's processes by their words: `worker 0`, `shard 1`."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            words = child.cmdline()
            for flag, role in (("--rank", "worker"), ("--shard", "shard")):
                if flag in words:
                    found[f"{role} {words[words.index(flag) + 1]}"] = child
        return found

    def close(self) -> None:
        """End whatever is left."""
        left = []
        if self.process.poll() is None:
            left = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGKILL)
        for process in left:
            if process.is_running():
                process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextmanager
def training(folder: Path, *words: object, command: str = "train") -> Iterator[Training]:
    """`poseidon train`, or another command that starts a job, with these words; ended at the latest with the block."""
    job = Training(folder, command, words)
    try:
        yield job
    finally:
        job.close()
