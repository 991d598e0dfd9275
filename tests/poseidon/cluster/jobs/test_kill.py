"""Killing jobs: every process of the one, none of the other, with the launcher or without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from poseidon.cluster.jobs.kill import KillTimeouts, job_processes, kill_job, live_process
from poseidon.cluster.jobs.registry import RecordedProcess, Registry
from poseidon.cluster.process import creation
from poseidon.errors import JobError
from tests.support.job_child import child
from tests.support.jobs import running_job
from tests.support.live_processes import live_pids, none_left

pytestmark = pytest.mark.processes

PATIENCE = KillTimeouts(launcher_s=5.0, grace_s=2.0)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("0 127.0.0.1 0\n1 localhost 0\n")
    return path


def test_with_its_launcher(tmp_path: Path, hostfile: Path) -> None:
    registry = Registry(tmp_path)
    with running_job(tmp_path, "job-a", hostfile) as job:
        os.kill(job.launcher.pid, signal.SIGSTOP)
        # Worker 0 stops when asked; worker 1 of this job does not, and the launcher waits for it.
        patience = KillTimeouts(launcher_s=0.2, grace_s=2.0)
        # Processes that ended while the launcher was asked count too, although the launcher needs
        # longer.
        assert kill_job(job.job, registry, timeouts=patience) == 5
        assert none_left([*job.pids, job.launcher.pid])
    assert registry.jobs() == ()


def test_without_a_record(tmp_path: Path, hostfile: Path) -> None:
    registry = Registry(tmp_path)
    with running_job(tmp_path, "job-a", hostfile) as job:
        job.kill_launcher()
        registry.remove(job.job)
        assert kill_job(job.job, registry, timeouts=PATIENCE) == 4
        assert live_pids(job.pids) == []


def test_an_agent_that_is_not_on_record_is_stopped(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "poseidon.cluster.agent", "--job", f"job-{uuid.uuid4().hex}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        try:
            assert kill_job(argv[-1], Registry(tmp_path), timeouts=PATIENCE) == 1
        finally:
            agent.kill()


def test_processes_that_do_not_end_are_named(
    tmp_path: Path, hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_job(tmp_path, "job-a", hostfile) as job:
        job.kill_launcher()
        immortal, send = job.pids[1], psutil.Process.send_signal
        monkeypatch.setattr(
            psutil.Process,
            "send_signal",
            lambda self, number: self.pid == immortal or send(self, number),
        )
        with pytest.raises(JobError) as caught:
            kill_job(
                job.job, Registry(tmp_path), timeouts=KillTimeouts(launcher_s=0.0, grace_s=0.2)
            )
    said = f"job {job.job}: 3 processes stopped; these could not be stopped: pid {immortal}"
    assert str(caught.value) == said


def test_a_process_that_was_not_yet_on_record(tmp_path: Path, hostfile: Path) -> None:
    registry = Registry(tmp_path)
    with running_job(tmp_path, "job-a", hostfile) as job:
        job.kill_launcher()
        record = registry.read(job.job)
        assert record is not None
        registry.write(replace(record, processes=record.processes[:2]))
        kill_job(job.job, registry, timeouts=PATIENCE)
        assert live_pids(job.pids) == []


def test_a_reused_pid_is_left_alone(tmp_path: Path, hostfile: Path) -> None:
    # A bystander that has the pid of a process on record, but was created at another time; and
    # whose arguments hold the id, but not next to `--job`.
    registry = Registry(tmp_path)
    with running_job(tmp_path, "job-a", hostfile) as job:
        arguments = (job.job, "--job", f"{job.job}b", f"--job={job.job}")
        with subprocess.Popen(
            child("say('ready'); forever()", *arguments), stdin=-1, stdout=-1
        ) as bystander:
            assert bystander.stdin is not None
            assert bystander.stdout is not None
            bystander.stdin.write(b"{}\n")
            bystander.stdin.flush()
            bystander.stdout.readline()
            job.kill_launcher()
            record = registry.read(job.job)
            assert record is not None
            stale = replace(record.processes[0], pid=bystander.pid)
            registry.write(replace(record, processes=(stale, *record.processes[1:])))
            kill_job(job.job, registry, timeouts=PATIENCE)
            assert live_pids(job.pids) == []
            assert bystander.poll() is None
            bystander.kill()


def test_a_process_is_found_after_its_hosts_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid()
    recorded = RecordedProcess(name="launcher", host="127.0.0.1", pid=me, created=creation(me))
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 3600.0)
    assert live_process(recorded) is not None
    assert live_process(replace(recorded, created=f"another boot{recorded.created}")) is None


def test_a_job_that_has_ended(tmp_path: Path, hostfile: Path) -> None:
    registry = Registry(tmp_path)
    with running_job(tmp_path, "job-a", hostfile) as job:
        record = registry.read(job.job)
        assert record is not None
        assert live_process(record.launcher) is not None
        assert live_process(replace(record.launcher, host="node7")) is None
        assert len(job_processes(job.job, record)) == 4
        kill_job(job.job, registry, timeouts=KillTimeouts(launcher_s=0.1, grace_s=2.0))
        job.launcher.wait(30)
    assert kill_job(job.job, registry, timeouts=PATIENCE) == 0
    assert live_process(record.launcher) is None
    assert psutil.Process().is_running()
