"""Processes that work at the same time: their answers, and what goes wrong in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.observe.plan.processes import Processes, ProcessFailed
from tests.support.live_processes import none_left

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.mark.parametrize("int8", [False, True])
def test_workers_push_to_the_shards_of_a_store_and_read(int8: bool) -> None:
    with Processes(2) as processes:
        addresses = processes.ask(processes.shards, "serve")
        assert len(set(addresses)) == 2
        processes.ask(processes.workers, "join", addresses, 3, int8)
        assert min(processes.ask(processes.workers, "iterate", 0, 2)) > 0
        processes.ask(processes.workers, "leave")
        processes.ask(processes.shards, "leave")
        assert min(processes.ask([*processes.workers, *processes.shards], "cpu_s")) > 0


def test_each_hook_of_ddp_takes_time(tmp_path: Path) -> None:
    with Processes(1) as processes:
        everyone = (*processes.workers, *processes.shards)
        for found in processes.ask(
            everyone, "hooks", str(tmp_path / "ranks"), 2, (None, 0, 1, 4), 1
        ):
            assert len(found) == 4
            assert min(found) > 0


OWNER = """
import os
from poseidon.observe.plan.processes import Processes
processes = Processes(1)
for position in (0, 1):
    processes.ask([position], "cpu_s")
print(*(process.pid for process in processes._processes), flush=True)
processes.ask([0], "hooks", FILE, 2, (None,), 1)  # waits for a second rank, which never comes
"""


def test_processes_that_wait_within_torch_end_with_their_parent(tmp_path: Path) -> None:
    program = OWNER.replace("FILE", repr(str(tmp_path / "ranks")))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        members = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(members) == 2
    assert none_left(members, 30.0)


def test_a_failure_within_a_process_is_one_sentence() -> None:
    with Processes(1) as processes:
        with pytest.raises(ProcessFailed, match=r"arithmetic failed: .*no_such_work"):
            processes.ask(processes.workers, "arithmetic", "no_such_work", 0.0)
        assert len(processes.ask(processes.shards, "cpu_s")) == 1
