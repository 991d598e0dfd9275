"""What a host answers about its jobs, on true jobs and to senseless requests."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from poseidon.cluster.jobs.kill import KillTimeouts, kill_job, live_process
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.jobs.this_host import (
    HostJob,
    Killed,
    KillRequest,
    jobs_here,
    kill_jobs,
    list_jobs,
)
from poseidon.cluster.machinefile import Host
from poseidon.errors import UsageError
from ps_server.json_fields import fields_of, plain, value_of
from tests.support.jobs import job_that_listens, running_job
from tests.support.live_processes import live_pids, none_left

GONE = JobRecord(
    job="gone",
    launcher=RecordedProcess(name="launcher", host="127.0.0.1", pid=2**22 + 1, created="1.0"),
    hostfile="/hosts",
    hosts=(Host(id=0, address="node7", port=9999, user="ml", ssh_port=2222),),
    output="/out",
    started_s=1.0,
)


@pytest.mark.processes
def test_jobs_are_listed_and_one_is_killed(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("0 127.0.0.1 0\n1 127.0.0.1 0\n")
    registry = Registry(tmp_path)
    with (
        running_job(tmp_path, "job-a", hostfile) as job,
        running_job(tmp_path, "job-b", hostfile) as other,
    ):
        job.kill_launcher()
        os.kill(job.pids[2], signal.SIGSTOP)  # stopped processes must go too
        seen = {found.record.job: found for found in list_jobs(registry).jobs}
        assert {name: (found.launcher, found.living) for name, found in seen.items()} == {
            job.job: (False, 4),
            other.job: (True, 4),
        }
        assert seen[job.job].record == registry.read(job.job)
        timeouts = KillTimeouts(launcher_s=5, grace_s=2)
        assert kill_jobs(KillRequest(jobs=(job.job,), timeouts=timeouts), registry) == Killed(
            counts={job.job: 4}
        )
        assert none_left(job.pids)
        assert len(live_pids([*other.pids, other.launcher.pid])) == 5


@pytest.mark.processes
def test_what_a_job_has_started_besides_its_workers_and_shards_is_not_counted(
    tmp_path: Path,
) -> None:
    """An agent, a data loader: they keep a job listed, and `poseidon kill` ends them."""
    with job_that_listens(tmp_path, "job-c"):
        found = {job.record.job: job.living for job in jobs_here(Registry(tmp_path), print)}
    assert found == {"job-c": 0}


def test_a_record_that_cannot_be_removed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, told = Registry(tmp_path), list[str]()
    for job in ("gone", "gone-too"):
        registry.write(replace(GONE, job=job))

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert jobs_here(registry, told.append) == []
    assert [words.rpartition("/")[2] for words in told] == [
        "gone-too.json: Read-only file system",
        "gone.json: Read-only file system",
    ]
    patience = KillTimeouts(launcher_s=0, grace_s=0)
    assert kill_job("gone", registry, timeouts=patience) == 0


def test_what_has_gone_is_forgotten_save_where_it_may_live_elsewhere(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    far = RecordedProcess(name="worker 0", host="node7", pid=1, created="1.0")
    registry.write(GONE)
    registry.write(replace(GONE, job="far", processes=(far,)))
    (Registry(tmp_path).folder / "broken.json").write_text("{")
    warnings: list[str] = []
    assert live_process(far) is None
    assert [job.record.job for job in jobs_here(registry, warnings.append)] == ["far"]
    assert len(warnings) == 1 and "broken.json" in warnings[0]
    assert set(registry.jobs()) == {"broken", "far"}


TIMEOUTS = {"launcher_s": 1, "grace_s": 1}


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({}, "jobs"),
        ({"jobs": ["a"], "timeouts": {**TIMEOUTS, "launcher_s": True}}, "launcher_s"),
        ({"jobs": ["a"], "timeouts": {**TIMEOUTS, "grace_s": -1}}, "grace_s"),
        ({"jobs": ["a"], "timeouts": {**TIMEOUTS, "grace_s": float("nan")}}, "grace_s"),
        ({"jobs": "a", "timeouts": TIMEOUTS}, "jobs"),
        ({"jobs": [1], "timeouts": TIMEOUTS}, "jobs"),
        ({"jobs": ["../../etc"], "timeouts": TIMEOUTS}, "cannot be a job id"),
    ],
)
def test_senseless_requests(request_fields: dict[str, object], words: str) -> None:
    with pytest.raises((ValueError, UsageError), match=words):
        value_of(KillRequest, request_fields)


def test_nobody_lets_a_host_wait_for_hours(tmp_path: Path) -> None:
    kill = KillRequest(jobs=("a",), timeouts=KillTimeouts(grace_s=3601.0))
    with pytest.raises(UsageError, match="at most 3600 seconds"):
        kill_jobs(kill, Registry(tmp_path))


def test_a_job_travels_whole() -> None:
    job = HostJob(record=GONE, launcher=True, living=3)
    assert value_of(HostJob, json.loads(json.dumps(fields_of(job), default=plain))) == job
