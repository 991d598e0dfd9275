"""Processes that work at the same time: their answers, and what goes wrong in them."""

from __future__ import annotations

import pytest

from poseidon.plan.processes import Processes, ProcessFailed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def test_workers_push_to_the_shards_of_a_store_and_read() -> None:
    with Processes(2) as processes:
        addresses = processes.ask(processes.shards, "serve")
        assert len(set(addresses)) == 2
        processes.ask(processes.workers, "join", addresses, 3)
        assert min(processes.ask(processes.workers, "iterate", 0, 2)) > 0
        processes.ask(processes.workers, "leave")
        processes.ask(processes.shards, "leave")
        assert min(processes.ask([*processes.workers, *processes.shards], "cpu_s")) > 0


def test_a_failure_within_a_process_is_one_sentence() -> None:
    with Processes(1) as processes:
        with pytest.raises(ProcessFailed, match=r"arithmetic failed: .*no_such_work"):
            processes.ask(processes.workers, "arithmetic", "no_such_work", 0.0)
        assert len(processes.ask(processes.shards, "cpu_s")) == 1
