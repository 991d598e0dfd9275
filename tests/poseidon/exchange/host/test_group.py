"""The memory that the workers of a host share, and what is left of it when they are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.exchange.host.group import HostMemory, new_file
from ps_server import TransportError

SIZES, PARTS = [5, 1, 40], [[0, 1, 2], [1, 0, 1], [0, 0, 0]]


def test_what_one_worker_writes_all_others_read() -> None:
    file = new_file()
    one, other = (HostMemory(SIZES, PARTS, os.dup(file)) for _ in range(2))
    os.close(file)
    for number, value in enumerate(one.values):
        value.fill_(number)
    written = 10.0
    for piece, counts in enumerate(PARTS):
        for worker, count in enumerate(counts):
            assert len(one.parts(piece, worker)) == count
            for place in one.parts(piece, worker):
                written += 1.0
                place.fill_(written)
    read = 10.0
    for piece, counts in enumerate(PARTS):
        assert other.values[piece].tolist() == [piece] * SIZES[piece]
        for worker in range(len(counts)):
            for place in other.parts(piece, worker):
                read += 1.0
                assert place.tolist() == [read] * SIZES[piece]
    one.close()
    other.close()


def test_a_host_without_tensors_has_memory_too() -> None:
    HostMemory([], [], new_file()).close()


def test_memory_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(file: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(TransportError, match="cannot share 4 MiB of memory: No space left"):
        HostMemory([2**20], [[0, 0]], new_file())


CHILD = """
import os, signal
from poseidon.exchange.host.group import HostMemory, new_file
HostMemory([1000], [[0, 1]], new_file()).values[0].fill_(1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no /dev/shm")
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert set(Path("/dev/shm").iterdir()) <= before
    assert list(tmp_path.iterdir()) == []
