"""Jobs on other hosts: on hosts that only answer, and behind a real sshd."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.jobs.kill import KillTimeouts
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.jobs.remote_hosts import (
    SshAgents,
    account_of,
    kill_remote_jobs,
    list_remote_jobs,
    remote_hosts,
)
from poseidon.cluster.jobs.this_host import HostJob, JobList, Killed, KillRequest
from poseidon.cluster.machinefile import Host, SshSettings, parse_machinefile
from poseidon.cluster.process import creation
from poseidon.cluster.python_command import LauncherEnvironment
from poseidon.errors import JobError
from ps_server.json_fields import plain
from tests.support.loopback_sshd import LoopbackSshd
from tests.support.polling import until

HOSTS = parse_machinefile(
    "0 127.0.0.1 9000\n1 node1 9000\n2 node2 9000 user=ml\n3 node1 9500\n4 Node2 9500 user=ml\n5 "
    "node2 9700\n",
    source="hosts",
)
JOB = JobRecord(
    job="job-a",
    launcher=RecordedProcess(name="agent", host="127.0.0.1", pid=10, created="1.0"),
    hostfile=None,
    hosts=HOSTS,
    output="/out",
    started_s=1.0,
)
SEEN = HostJob(record=JOB, launcher=True, living=2)


class Network:
    """An agent of each host, that answers, or what is in the way; keeps the requests."""

    def __init__(self, answers: Mapping[int, object]) -> None:
        self._answers = answers
        self.requests: list[Mapping[str, object]] = []

    def __call__(self, host: Host) -> RemoteAgent:
        answer = self._answers[host.id]
        if isinstance(answer, JobError):
            raise answer
        return FakeAgent(host, answer, self.requests)


class FakeAgent(RemoteAgent):
    """An agent that answers what it is told to."""

    def __init__(self, host: Host, answer: object, requests: list[Mapping[str, object]]) -> None:
        super().__init__(QueueChannel.pair()[0], host.address)
        self._answered, self._asked = answer, requests

    def ask(
        self, service: Service, request: Mapping[str, object], timeout_s: float = 0.0
    ) -> Mapping[str, object]:
        self._asked.append(request)
        return json.loads(json.dumps(self._answered, default=plain))  # type: ignore[no-any-return]


def test_each_account_on_another_machine_is_asked_once() -> None:
    assert [client.id for client in remote_hosts(HOSTS)] == [1, 2, 5]
    assert list_remote_jobs((), Network({})) == ([], [])


def test_a_host_that_is_down_hides_no_other() -> None:
    network = Network(
        {1: JobError("ml@node1: cannot be reached"), 2: JobList(jobs=(SEEN,)), 5: JobList()}
    )
    jobs, problems = list_remote_jobs(remote_hosts(HOSTS), network)
    assert [(job.host.id, job.reported) for job in jobs] == [(2, SEEN)]
    assert problems == ["ml@node1: cannot be reached"]


def test_wrong_answers_are_told_by_host() -> None:
    network = Network(
        {1: {"jobs": [3]}, 2: JobList(problems=("no disk",)), 5: JobList(jobs=(SEEN,))}
    )
    jobs, problems = list_remote_jobs(remote_hosts(HOSTS), network)
    assert [job.host.id for job in jobs] == [5]
    assert problems == [
        "node1: its answer cannot be read: {'jobs': [3]} (JobList has [3] as its jobs)",
        "node2: no disk",
    ]


def test_what_was_stopped_is_reported_by_host() -> None:
    network = Network(
        {
            1: Killed(counts={"job-a": 2, "other": 4}),
            2: Killed(counts={"job-b": 0}, problems=("job job-a: pid 9\x1b could not be stopped",)),
            5: JobError("node2: no answer within 15 s"),
        }
    )
    patience = KillTimeouts(launcher_s=1.0, grace_s=0.5)
    kill = KillRequest(jobs=("job-a", "job-b"), timeouts=patience)
    found, problems = kill_remote_jobs(kill, remote_hosts(HOSTS), network)
    counts = {(job, host.id): count for (job, host), count in found.items()}
    assert counts == {("job-a", 1): 2, ("job-b", 2): 0}
    assert problems == [
        "node2: job job-a: pid 9\\x1b could not be stopped",
        "node2: no answer within 15 s",
    ]
    assert network.requests == [{"jobs": kill.jobs, "timeouts": patience}] * 2


ROOT = Path(__file__).parents[4]
OWN = LauncherEnvironment(python=sys.executable, checkout=str(ROOT), folder=str(ROOT))
FAR = Host(id=0, address="127.0.0.1", port=0)


@pytest.fixture
def far_home(sshd: LoopbackSshd, tmp_path: Path) -> Iterator[Path]:
    """The state folder of what runs on the host, which has a job of this process."""
    before = sshd.server_config.read_text()
    sshd.server_config.write_text(f"{before}SetEnv POSEIDON_HOME={tmp_path}\n")
    me = RecordedProcess(
        name="launcher", host="127.0.0.1", pid=os.getpid(), created=creation(os.getpid())
    )
    Registry(tmp_path).write(replace(JOB, launcher=me))
    yield tmp_path
    sshd.server_config.write_text(before)


def _receivers() -> list[str]:
    """The threads that read from agents."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("poseidon") and name.endswith("receive")]


@pytest.mark.needs("sshd")
@pytest.mark.processes
def test_a_host_is_asked_over_ssh_and_again_after_its_connection_broke(
    sshd: LoopbackSshd, far_home: Path
) -> None:
    own = {account_of(replace(FAR, id=7)): SshSettings(config=sshd.config)}
    with SshAgents(SshSettings(config=Path("/dev/null")), OWN, own) as ask:
        for _ in range(2):
            jobs, problems = list_remote_jobs([FAR], ask)
            assert ([job.reported.record.job for job in jobs], problems) == (["job-a"], [])
            assert jobs[0].reported.launcher
            sshd.break_lines()
            until(lambda: not _receivers(), "the loss was not noticed", 10.0)
        timeouts = KillTimeouts(launcher_s=1.0, grace_s=0.5)
        kill = KillRequest(jobs=("none-of-that-name",), timeouts=timeouts)
        assert kill_remote_jobs(kill, [FAR], ask) == ({("none-of-that-name", FAR): 0}, [])
