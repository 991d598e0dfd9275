"""Stopping jobs on several hosts: in which order these are asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.jobs.kill import AGENT, KillTimeouts
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.jobs.remote_hosts import AgentOf, RemoteJob
from poseidon.cluster.jobs.stop import (
    StopTargets,
    jobs_by_id,
    jobs_of_hostfile,
    jobs_of_machinefile,
    remote_jobs_of_machinefile,
    stop_jobs,
)
from poseidon.cluster.jobs.this_host import HostJob, JobList, Killed, KillRequest
from poseidon.cluster.machinefile import Host


class FakeAgent:
    """An agent of one host, whose answers a function makes of it and of what it is asked."""

    def __init__(
        self, host: Host, answer: Callable[[Host, KillRequest | None], JobList | Killed]
    ) -> None:
        self._host, self._answer = host, answer

    def ask_for(
        self, kind: type, service: Service, request: Any, limit_s: float
    ) -> JobList | Killed:
        return self._answer(self._host, request)


def agents_that(answer: Callable[[Host, KillRequest | None], JobList | Killed]) -> AgentOf:
    return lambda host: FakeAgent(host, answer)  # type: ignore[return-value]


HOSTS = tuple(Host(id=number, address=f"node{number}", port=9000) for number in range(3))
AGENT_OF_HOST = RecordedProcess(name=AGENT, host="127.0.0.1", pid=10, created="1.0")
RECORD = JobRecord(
    job="job-a", launcher=AGENT_OF_HOST, hostfile=None, hosts=HOSTS, output="/out", started_s=1.0
)


def test_the_host_of_the_launcher_is_asked_before_the_others(tmp_path: Path) -> None:
    asked: list[int] = []

    def ask(host: Host, kill: KillRequest | None) -> JobList | Killed:
        launcher = replace(AGENT_OF_HOST, name="launcher") if host.id == 1 else AGENT_OF_HOST
        if kill is None:
            job = HostJob(record=replace(RECORD, launcher=launcher), launcher=True, living=2)
            return JobList(jobs=(job,))
        asked.append(host.id)
        return Killed(counts={"job-a": 3 if host.id == 1 else 0})

    lines: list[str] = []
    targets = jobs_by_id(["job-a"], [], agents_that(ask), more_hosts=HOSTS)
    assert (
        stop_jobs(targets, Registry(tmp_path), agents_that(ask), KillTimeouts(), lines.append) == []
    )
    assert asked[0] == 1 and sorted(asked) == [0, 1, 2]
    # Processes that ran when the hosts were listed have ended with their launcher.
    assert lines == ["job job-a: 9 processes stopped (3 on node1, 3 on node0, 3 on node2)"]


def test_hosts_that_have_joined_are_asked_too(tmp_path: Path) -> None:
    asked: list[int] = []

    def ask(host: Host, kill: KillRequest | None) -> JobList | Killed:
        asked.append(host.id)
        return JobList()

    hostfile = tmp_path / "hosts"
    record = replace(RECORD, hostfile=str(hostfile), hosts=HOSTS[:2], joined=HOSTS[2:])
    for targets in (
        jobs_by_id(["job-a"], [record], agents_that(ask)),
        jobs_of_hostfile(hostfile, [record], agents_that(ask)),
    ):
        assert (targets.jobs, targets.hosts) == (("job-a",), HOSTS)
    assert sorted(asked) == [0, 0, 1, 1, 2, 2]


def test_jobs_that_are_left_alone_are_not_reported(tmp_path: Path) -> None:
    """As of `kill_caffe.py`, which leaves feature extractions of the machinefile alone."""
    kept = RemoteJob(
        host=HOSTS[0],
        reported=HostJob(record=replace(RECORD, job="extract-b"), launcher=False, living=4),
    )

    def ask(host: Host, kill: KillRequest | None) -> JobList | Killed:
        return Killed(counts={"job-a": 1})

    lines: list[str] = []
    targets = StopTargets(jobs=("job-a",), hosts=HOSTS[:1], records=(), seen=(kept,), problems=())
    assert (
        stop_jobs(targets, Registry(tmp_path), agents_that(ask), KillTimeouts(), lines.append) == []
    )
    assert lines == ["job job-a: 1 process stopped (1 on node0)"]


def test_a_line_names_some_hosts_of_many(tmp_path: Path) -> None:
    hosts = tuple(Host(id=number, address=f"node{number}", port=9000) for number in range(11))

    def ask(host: Host, kill: KillRequest | None) -> JobList | Killed:
        assert kill is not None
        return Killed(counts={job: 2 if job == "job-a" else 0 for job in kill.jobs})

    lines: list[str] = []
    targets = StopTargets(jobs=("job-a", "job-b"), hosts=hosts)
    assert (
        stop_jobs(targets, Registry(tmp_path), agents_that(ask), KillTimeouts(), lines.append) == []
    )
    named = ", ".join(f"2 on node{number}" for number in range(8))
    assert lines == [
        f"job job-a: 22 processes stopped ({named}, 6 on 3 more hosts)",
        "job job-b had already ended; its record is removed",
    ]


FIXED = (Host(id=0, address="127.0.0.1", port=5),)
FREE = (Host(id=0, address="127.0.0.1", port=0),)


def record(job: str, hostfile: str | None, clients: tuple[Host, ...]) -> JobRecord:
    launcher = RecordedProcess(name="the launcher", host="127.0.0.1", pid=10, created="1.0")
    return JobRecord(
        job=job, launcher=launcher, hostfile=hostfile, hosts=clients, output="", started_s=0.0
    )


@pytest.mark.parametrize(
    ("records", "clients", "jobs"),
    [
        ([record("a", "/hosts", FIXED), record("b", "/other", FREE)], FIXED, ["a"]),
        ([record("a", "/hosts", FIXED), record("b", "/copy", FIXED)], FIXED, ["a"]),
        ([record("a", "/copy", FIXED), record("b", None, FIXED)], FIXED, ["a", "b"]),
        ([record("a", "/copy", FREE)], FREE, []),
        ([record("a", "/hosts", FREE), record("b", "/hosts", FREE)], FREE, ["a", "b"]),
        ([record("a", "/hosts", FIXED)], None, ["a"]),
        ([record("a", "/other", FIXED)], None, []),
    ],
)
def test_selection(
    records: list[JobRecord], clients: tuple[Host, ...] | None, jobs: list[str]
) -> None:
    assert [found.job for found in jobs_of_machinefile(records, Path("/hosts"), clients)] == jobs


@pytest.mark.parametrize(
    ("records", "clients", "jobs"),
    [
        (
            [
                record("a", "/hosts", FIXED),
                record("b", "/copy", FIXED),
                record("c", "/hosts", FREE),
            ],
            FIXED,
            ["a", "b"],
        ),
        (
            [record("a", "/hosts", FREE), record("b", "/copy", FREE), record("c", None, FREE)],
            FREE,
            ["a"],
        ),
    ],
)
def test_selection_among_what_hosts_say(
    records: list[JobRecord], clients: tuple[Host, ...], jobs: list[str]
) -> None:
    theirs = [record.for_agents() for record in records]
    found = remote_jobs_of_machinefile(theirs, Path("/hosts"), clients)
    assert [record.job for record in found] == jobs
    assert all(not record.all_hosts for record in theirs)


def test_a_job_whose_hosts_were_checked_is_the_one_of_its_lines() -> None:
    checked = tuple(replace(host, peer_address="10.0.0.7") for host in FIXED)
    records = [record("a", "/other", checked), record("b", None, (*FIXED, *FIXED))]
    found = jobs_of_machinefile(records, Path("/hosts"), FIXED)
    assert [record.job for record in found] == ["a"]
