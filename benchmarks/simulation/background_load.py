"""Background load on every core, in separate processes, while something is measured."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.processes import Processes

LIMIT_S = 60.0
LOOK_S = 0.01


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy with products of factors, the work of other hosts, inside the block.

    Raises:
        TestbedError: a process did not start.
    """
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        names = [f"busy {core}" for core in range(os.cpu_count() or 1)]
        for name in names:
            processes.start(name, (sys.executable, "-m", "benchmarks.simulation.busy_probe"))
        deadline = time.monotonic() + LIMIT_S
        while not all(processes.output(name) for name in names):
            processes.check()
            if time.monotonic() > deadline:
                raise TestbedError(f"the cores were not busy within {LIMIT_S:g} s")
            time.sleep(LOOK_S)
        yield
