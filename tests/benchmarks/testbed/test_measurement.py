"""Measuring by turns, with jobs and hosts that only count."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.testbed.control import Round
from benchmarks.testbed.hosts import Hosts, Traffic
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.measurement import Effort, Measured, measure
from benchmarks.testbed.processes import CpuTime

WARM_S = 100.0


class FakeHosts:
    """Two hosts; each iteration moves what its job says."""

    def __init__(self) -> None:
        self.sent = [0, 0]

    def quiet_traffic(self) -> list[Traffic]:
        return [Traffic(sent_bytes=sent, received_bytes=2 * sent) for sent in self.sent]

    def __len__(self) -> int:
        return 2


class FakeJob:
    """Iterations of known length; the warm ones are absurdly long."""

    period, plain_iterations, overlaps = 1, 0, True

    def __init__(
        self, name: str, hosts: FakeHosts, log: list[str], lengths: list[float], moved: int
    ) -> None:
        self.name = name
        self._hosts = hosts
        self._log = log
        self._lengths = lengths
        self._moved = moved
        self._done = 0
        self.losses: list[float] = []

    def shard_times(self) -> list[CpuTime]:
        return [CpuTime(user_s=2.0 * self._done, system_s=1.0 * self._done)]

    def round(self, iterations: int) -> list[Round]:
        self._log.append(f"{self.name} {iterations}")
        self._hosts.sent = [sent + self._moved * iterations for sent in self._hosts.sent]
        seconds = (
            (WARM_S,) * 2 + (self._lengths.pop(0),) * (iterations - 2)
            if iterations > 2
            else (WARM_S,) * 2
        )
        self._done += iterations
        self.losses += [float(self._done)] * iterations
        warm, counted = min(iterations, 2), max(iterations - 2, 0)
        user_s, system_s = ((WARM_S,) * warm + (each,) * counted for each in (0.5, 0.25))
        times = Round(seconds=seconds, user_s=user_s, system_s=system_s, losses=(0.0,) * iterations)
        return [times] * 2


@pytest.fixture
def log() -> list[str]:
    return []


def run(log: list[str]) -> list[Any]:
    hosts = FakeHosts()
    jobs = [
        FakeJob("A", hosts, log, [1.0, 3.0, 2.0], moved=10),
        FakeJob("B", hosts, log, [5.0, 5.0, 5.0], moved=1000),
    ]
    effort = Effort(rounds=3, iterations=4, warm=2)
    return measure(cast("Hosts", hosts), cast("list[HostJob]", jobs), effort)


def test_jobs_take_turns_after_a_warm_round(log: list[str]) -> None:
    run(log)
    assert log == ["A 2", "B 2", *["A 6", "B 6"] * 3]


def test_a_round_has_whole_periods_of_a_jobs_transfers(log: list[str]) -> None:
    hosts = FakeHosts()
    job = FakeJob("A", hosts, log, [1.0] * 9, moved=10)
    job.period, job.plain_iterations = 4, 2
    (measured,) = measure(
        cast("Hosts", hosts), cast("list[HostJob]", [job]), Effort(rounds=1, iterations=5, warm=2)
    )
    assert log == ["A 6", "A 12"]
    assert measured.sent_bytes == [10, 10]


def test_synchronous_iterations_need_no_warm_ones(log: list[str]) -> None:
    hosts = FakeHosts()
    jobs = [FakeJob(name, hosts, log, [1.0] * 9, moved=10) for name in ("A", "B")]
    jobs[1].overlaps = False
    effort = Effort(rounds=1, iterations=4, warm=2, warm_ddp=0)
    measure(cast("Hosts", hosts), cast("list[HostJob]", jobs), effort)
    assert log == ["A 2", "B 1", "A 6", "B 4"]


def test_quartiles_are_those_of_the_rounds() -> None:
    assert Measured(name="A", seconds=[4.0, 1.0, 2.0]).quartiles_s == (1.5, 3.0)
    assert Measured(name="A", seconds=[4.0]).quartiles_s == (4.0, 4.0)


def test_losses_are_those_of_all_iterations(log: list[str]) -> None:
    first, _ = run(log)
    assert first.losses == [2.0] * 2 + [8.0] * 6 + [14.0] * 6 + [20.0] * 6


def test_warm_iterations_do_not_count(log: list[str]) -> None:
    first, second = run(log)
    assert (first.median_s, first.spread) == (2.0, 1.0)
    assert second.median_s == 5.0


def test_each_job_is_told_its_own_bytes(log: list[str]) -> None:
    first, second = run(log)
    assert (first.sent_bytes, first.received_bytes) == ([10, 10], [20, 20])
    assert second.sent_bytes == [1000, 1000]


def test_processor_time_is_that_of_one_iteration_on_all_hosts(log: list[str]) -> None:
    first, _ = run(log)
    split = first.split[0]
    assert (split.worker_user_s, split.worker_system_s) == (1.0, 0.5)
    assert (split.shard_user_s, split.shard_system_s) == (2.0, 1.0)
    assert split.total_s == 4.5
