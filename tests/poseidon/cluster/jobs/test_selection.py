"""Which jobs belong to a machinefile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess
from poseidon.cluster.jobs.selection import jobs_of_machinefile, remote_jobs_of_machinefile
from poseidon.cluster.machinefile import Host

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
