"""Jobs on four remote hosts, listed and stopped from the host of their launcher, after it was
killed.

The processes of these jobs do nothing, so that nothing but starting and stopping them takes time.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

import psutil
import pytest

from tests.support.live_processes import none_left
from tests.support.ssh_hosts import ROOT, SshHost, SshHosts, clean_environment

pytestmark = [pytest.mark.needs("hosts"), pytest.mark.processes, pytest.mark.timeout(150)]

STATE = "/root/.local/state/poseidon"
KILL_CAFFE = [sys.executable, str(ROOT / "scripts" / "kill_caffe.py")]
POSEIDON = [sys.executable, "-m", "poseidon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Four hosts, and the environment of the launcher."""

    hosts: Sequence[SshHost]
    desk: SshHost

    def pids(self, job: str) -> list[int]:
        """Return the processes of a job on the hosts, with the test's pids."""
        return [process.pid for host in self.hosts for process in host.processes_of(job)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with SshHosts(tmp_path_factory.mktemp("far"), 5) as hosts:
        yield Site(hosts=hosts[:4], desk=hosts[4])


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job with an agent, a shard and a worker on each of the four."""

    job: str
    launcher: psutil.Process
    said: IO[str]


@contextmanager
def remote_job(site: Site, stem: str, port: int) -> Iterator[RemoteJob]:
    """A job from the machinefile `stem`, which lies in the desk's home."""
    lines = [f"{index} {host.name} {port}\n" for index, host in enumerate(site.hosts)]
    site.desk.outside(f"/root/{stem}").write_text("".join(lines))
    job = f"{stem}-{uuid.uuid4().hex[:8]}"
    words = [sys.executable, "-m", "tests.support.job_launcher", STATE, job, stem]
    with subprocess.Popen(
        site.desk.command(words),
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
        text=True,
    ) as entered:
        assert entered.stdout is not None
        try:
            assert entered.stdout.readline().startswith("["), "the job did not start"
            (launcher,) = site.desk.processes_of(job)
            yield RemoteJob(job=job, launcher=launcher, said=entered.stdout)
        finally:
            for host in (site.desk, *site.hosts):
                for process in host.processes_of(job):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            entered.send_signal(signal.SIGCONT)  # nsenter stops with what it started


def test_kill_caffe_after_kill_9_of_the_launcher(site: Site) -> None:
    with remote_job(site, "job-a", 9000) as job, remote_job(site, "job-b", 9500) as other:
        mine, others = site.pids(job.job), site.pids(other.job)
        assert (len(mine), len(others)) == (12, 12)
        # Agents that stand still cannot end what is theirs when their line breaks.
        for pid in mine[:9]:
            psutil.Process(pid).suspend()
        job.launcher.kill()
        done = site.desk.run([*KILL_CAFFE, "job-a"])
        assert none_left(mine)
        assert site.pids(job.job) == []
        (said,) = done.stdout.splitlines()
        assert said.startswith(f"job {job.job}: ")
        for host in site.hosts[:3]:
            assert f"3 on {host.name}" in said
        again = site.desk.run([*KILL_CAFFE, "job-a"])
        assert again.stdout == (
            "no job that was started from job-a is running on this machine or its 4 hosts; "
            "`poseidon ps` lists the jobs that run\n"
        )
        assert site.pids(other.job) == others
        assert other.launcher.is_running()
        other.launcher.kill()
        assert none_left(others, 30.0)  # by their agents


def test_a_job_is_listed_everywhere_and_killed_from_another_machine(site: Site) -> None:
    elsewhere, down = site.hosts[0], site.hosts[3]
    with remote_job(site, "job-c", 9000) as job:
        elsewhere.outside("/root/copy").write_bytes(site.desk.outside("/root/job-c").read_bytes())
        listed = elsewhere.run([*POSEIDON, "ps", "--hostfile=copy"]).stdout
        rows = [line.split() for line in listed.splitlines()[1:]]
        assert [row[:2] for row in rows] == [[host.name, job.job] for host in site.hosts]
        mine = site.pids(job.job)
        job.launcher.suspend()  # or it would end the job by itself when it loses the host
        down.crash()
        done = elsewhere.run([*POSEIDON, "kill", "copy"], check=False)
        down.start()
        down.wait_until_up()
        assert done.returncode == 1
        assert "poseidon kill: processes may be left" in done.stderr
        assert "host3" in done.stderr
        assert none_left(mine)


@pytest.mark.thorough
def test_a_job_that_is_killed_from_another_machine_is_not_started_again(site: Site) -> None:
    elsewhere = site.hosts[0]
    with remote_job(site, "job-d", 9000) as job:
        elsewhere.outside("/root/copy").write_bytes(site.desk.outside("/root/job-d").read_bytes())
        mine = site.pids(job.job)
        elsewhere.run([*POSEIDON, "kill", "copy"])
        assert none_left([*mine, job.launcher.pid])
        # A `JobInterrupted` would be a reason to start again.
        assert re.fullmatch(
            r"JobError: .*host\d: the job was killed there.*\n", job.said.readline()
        )
