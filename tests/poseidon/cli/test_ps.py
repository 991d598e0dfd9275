"""The table of `poseidon ps`; the command itself is tested with true jobs in test_kill.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from poseidon.cli.ps import _fields, _hosts_of, _row
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess
from poseidon.cluster.jobs.this_host import HostJob
from poseidon.cluster.machinefile import Host, read_machinefile
from poseidon.observe.metrics.job_statistics import FILE_NAME, JobStatistics, encode_statistics
from poseidon.observe.metrics.progress import JobProgress


def test_hosts_that_have_joined_a_job_of_the_machinefile_are_asked_too(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("0 node0 0\n1 node1 0\n", encoding="utf-8")
    hosts = read_machinefile(hostfile)
    joined = (Host(id=2, address="node2", port=0),)
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="1.0")
    record = JobRecord(
        job="j",
        launcher=launcher,
        hostfile=str(hostfile),
        hosts=hosts,
        output="",
        started_s=1.0,
        joined=joined,
    )
    assert _hosts_of(hostfile, [record]) == (*hosts, *joined)
    assert _hosts_of(hostfile, [replace(record, hostfile="/other")]) == hosts


def test_how_far_a_job_has_come(tmp_path: Path) -> None:
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="1.0")
    record = JobRecord(
        job="j", launcher=launcher, hostfile=None, hosts=(), output=str(tmp_path), started_s=1.0
    )
    job = HostJob(record=record, launcher=True, living=0)
    assert _row(job)[4:7] == ("-", "-", "-")
    assert (_fields(None, job)["iteration"], _fields(None, job)["testing"]) == (None, None)
    progress = JobProgress(iteration=120, max_iter=4000, tested=1, to_test=9, rate=20.0)
    text = encode_statistics(JobStatistics(job="j", progress=progress))
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")
    assert _row(job)[4:7] == ("120 of 4000, testing 1 of 9", "20/s", "0:03:14")
    assert (_fields(None, job)["max_iter"], _fields(None, job)["eta_s"]) == (4000, 194.0)
    dead = replace(job, launcher=False)
    assert _row(dead)[4:7] == ("120 of 4000", "-", "-")
    assert (_fields(None, dead)["rate"], _fields(None, dead)["testing"]) == (None, False)
