"""Processes of a measurement: what they say, how they end, and that none stays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.processes import Processes, environment
from tests.support.live_processes import none_left


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_one_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("worker 3", python("print('the disk is full'); raise SystemExit(7)"))
        processes.await_end()
        with pytest.raises(
            TestbedError, match=r"(?s)worker 3 failed with status 7.*the disk is full"
        ):
            processes.check()


def test_one_that_ends_well_has_said_its_lines(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("one", python("print('a'); print('b')"))
        processes.await_end()
        processes.check()
        assert processes.output("one") == ["a", "b"]
        assert processes.cpu_time("one").user_s == 0.0  # gone


def test_all_are_ended_with_what_they_started(tmp_path: Path) -> None:
    program = (
        "import subprocess as s, time\n"
        "while time.process_time() < 0.1: pass\n"
        "c = s.Popen(['sleep', '1000']); print(c.pid, flush=True); c.wait()"
    )
    with Processes(tmp_path) as processes:
        processes.start("parent", python(program))
        while not processes.output("parent"):
            processes.check()
        child = int(processes.output("parent")[0])
        assert processes.cpu_time("parent").user_s > 0.0
    assert none_left([child])


def test_what_does_not_exist_cannot_be_started(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes, pytest.raises(TestbedError, match="cannot start ghost"):
        processes.start("ghost", ["/no/such/program"])


def test_every_measured_process_has_one_thread_and_the_jobs_malloc() -> None:
    variables = environment()
    assert variables["OMP_NUM_THREADS"] == "1"
    assert "MALLOC_MMAP_THRESHOLD_" in variables
