"""Stopping jobs on several hosts: in which order these are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from poseidon.cluster.jobs.kill import AGENT, KillTimeouts
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.jobs.remote_hosts import RemoteJob
from poseidon.cluster.jobs.stop import StopTargets, jobs_by_id, stop_jobs
from poseidon.cluster.jobs.this_host import Answer, HostJob
from poseidon.cluster.machinefile import Host

HOSTS = tuple(Host(id=number, address=f"node{number}", port=9000) for number in range(3))
AGENT_OF_HOST = RecordedProcess(name=AGENT, host="127.0.0.1", pid=10, created_s=1.0)
RECORD = JobRecord(
    job="job-a", launcher=AGENT_OF_HOST, hostfile=None, hosts=HOSTS, output="/out", started_s=1.0
)


def test_the_host_of_the_launcher_is_asked_before_the_others(tmp_path: Path) -> None:
    asked: list[int] = []

    def ask(host: Host, request: Mapping[str, object]) -> Sequence[Answer]:
        launcher = replace(AGENT_OF_HOST, name="launcher") if host.id == 1 else AGENT_OF_HOST
        if request["do"] == "list":
            job = HostJob(record=replace(RECORD, launcher=launcher), launcher=True, living=2)
            return [job.to_fields(), {"end": True}]
        asked.append(host.id)
        if host.id == 1:
            return [{"stopped": "launcher (pid 10) by asking the launcher"}, {"end": True}]
        return [{"end": True}]

    lines: list[str] = []
    targets = jobs_by_id(["job-a"], [], ask, more_hosts=HOSTS)
    assert stop_jobs(targets, Registry(tmp_path), ask, KillTimeouts(), lines.append) == []
    assert asked[0] == 1 and sorted(asked) == [0, 1, 2]
    assert lines[0] == "node1: stopped launcher (pid 10) by asking the launcher"
    assert "node0: 3 processes had ended with their launcher" in lines


def test_jobs_that_are_left_alone_are_not_reported(tmp_path: Path) -> None:
    """As of `kill_caffe.py`, which leaves feature extractions of the machinefile alone."""
    kept = RemoteJob(
        host=HOSTS[0], reported=HostJob(record=replace(RECORD, job="extract-b"), launcher=False, living=4)
    )

    def ask(host: Host, request: Mapping[str, object]) -> Sequence[Answer]:
        return [{"stopped": "worker 0 (pid 12) with SIGTERM"}, {"end": True}]

    lines: list[str] = []
    targets = StopTargets(jobs=("job-a",), hosts=HOSTS[:1], records=(), seen=(kept,), problems=())
    assert stop_jobs(targets, Registry(tmp_path), ask, KillTimeouts(), lines.append) == []
    assert lines == ["node0: stopped worker 0 (pid 12) with SIGTERM", "job job-a: 1 process stopped"]
