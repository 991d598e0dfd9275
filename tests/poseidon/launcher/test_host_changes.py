"""What a job answers to requests about its hosts, and which lost hosts it tries again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from poseidon.base.settings import read_settings
from poseidon.cluster.dial.dialer import Needs
from poseidon.cluster.dial.ssh import SshDialer
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registration, Registry
from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.cluster.machinefile import Host, SshSettings, parse_machinefile
from poseidon.cluster.python_command import LauncherEnvironment
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import RegroupRequested
from poseidon.errors import JobError
from poseidon.launcher.host_changes import HostChanges
from poseidon.launcher.newcomers import PreparedProcess
from poseidon.launcher.request import JobRequest
from poseidon.launcher.site import Site
from tests.support.fake_job import FakeJob

WORKER = ProcessName(role=Role.WORKER, index=1, client=1, host="b")
SHARD = ProcessName(role=Role.SHARD, index=1, client=1, host="b")

HOSTS = "0 node0 0\n1 node1 0\n2 node2 0 role=server"


class FakeSite(Site):
    """Hosts that are never connected."""

    def __init__(self, dialer: SshDialer) -> None:
        super().__init__(parse_machinefile(HOSTS, source="hosts"), dialer)
        self.reached: list[int] = []
        self.released: list[int] = []
        self.lacks = ""
        self.is_another_name = False

    def reach(self, host: Host, record: JobRecord, needs: Needs, files: object) -> Host:
        assert needs(host).id == host.id
        self.reached.append(host.id)
        if self.lacks:
            raise JobError(self.lacks)
        return host

    def has_processes(self, host: Host) -> bool:
        return self.is_another_name

    def release(self, hosts: object) -> None:
        assert isinstance(hosts, list)
        self.released += hosts


class ThreeWorkers(FakeJob):
    """A job that may have three workers."""

    fixed_because = ""

    def usual_virtual_workers(self, plan: object) -> int:
        return 3


class Changes(HostChanges):
    """Prepares no process."""

    def _prepare(self, host: Host) -> list[PreparedProcess]:
        return []


class Case:
    """The changes of a job on three hosts, of which one only serves."""

    def __init__(self, **flags: int) -> None:
        request = JobRequest(output=Path("out"), **flags)  # type: ignore[arg-type]
        launcher = LauncherEnvironment(python="python", checkout="", folder="/")
        self.dialer = SshDialer(SshSettings(), launcher)
        self.site = FakeSite(self.dialer)
        self.job = ThreeWorkers(request, self.site, title="", stem="j", devices=("cpu",))
        process = RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="1.0")
        record = JobRecord(
            job="j", launcher=process, hostfile=None, hosts=self.site.hosts, output="", started_s=1
        )
        self.registry = Registry(read_settings().state_folder)
        registration = Registration(self.registry, record)
        self.requests = SignalRequests(request.supervision_settings())
        self.said: list[str] = []
        self.changes = Changes(self.job, registration, self.requests, self.said.append)
        self.changes.on_started()

    def ask(self, do: str, host: str) -> str:
        """Return the answer to a request, with `error: ` before a refusal."""
        files = RequestFiles(self.registry.folder, self.job.id)
        files._request.write_text(f'{{"do": "{do}", "host": "{host}"}}')
        try:
            return files.ask(HostRequest(do=do, host=host), runs=self._serve, limit_s=30.0)
        except JobError as error:
            return f"error: {error}"

    def _serve(self) -> bool:
        self.changes._take_request()
        return True


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))


def nothing(case: Case) -> None:
    """The job is as it is."""


def lacks_data(case: Case) -> None:
    case.site.lacks = "root@node5: there is no /root/data"


def is_present(case: Case) -> None:
    case.site.is_another_name = True


def is_scheduled(case: Case) -> None:
    case.dialer.given = True


def is_fixed(case: Case) -> None:
    case.job.fixed_because = "--elastic is 0"  # type: ignore[misc]


def takes_none(case: Case) -> None:
    case.changes._takes_snapshots = False
    case.changes.on_event(
        WORKER_OF_HOST_CHANGES, {"event": "progress", "iteration": 3, "in_memory": None}
    )


def takes_some(case: Case) -> None:
    takes_none(case)
    case.changes.on_event(
        WORKER_OF_HOST_CHANGES, {"event": "progress", "iteration": 3, "in_memory": 2}
    )


NONE = (
    "the hosts of this job cannot change: its script has taken no snapshot in memory yet; it must "
    "call group.resume() and read from group.loader()"
)
WORKER_OF_HOST_CHANGES = ProcessName(role=Role.WORKER, index=0, client=0, host="node0")


@pytest.mark.parametrize(
    ("state", "request_", "answer"),
    [
        (nothing, "join node5", "client 3 (node5) takes part from now on"),
        (lacks_data, "join node5", "node5 cannot take part: root@node5: there is no /root/data"),
        (
            is_present,
            "join node5",
            "node5 cannot take part: it is already a host of the job, under a different name",
        ),
        (nothing, "join node1", "node1 is already a host of the job"),
        (
            nothing,
            "join localhost",
            "localhost cannot reach the job's hosts; expected an address that they reach",
        ),
        (
            is_scheduled,
            "join node5",
            "a scheduler or Ray chooses the hosts of this job, so no other host can join",
        ),
        (is_fixed, "join node5", "the hosts of this job cannot change: --elastic is 0"),
        (is_fixed, "leave node1", "the hosts of this job cannot change: --elastic is 0"),
        (takes_none, "leave node1", NONE),
        (takes_none, "join node5", NONE),
        (takes_some, "leave node1", "client 1 (node1) leaves the job after the next iteration"),
        (nothing, "leave node1", "client 1 (node1) leaves the job after the next iteration"),
        (is_scheduled, "leave 1", "client 1 (node1) leaves the job after the next iteration"),
        (
            nothing,
            "leave node7",
            "the job has no host node7; its clients are 0 (node0), 1 (node1), 2 (node2)",
        ),
        (nothing, "swap node1", "the launcher does not know the request 'swap'"),
    ],
)
def test_requests(state: Callable[[Case], None], request_: str, answer: str) -> None:
    case = Case()
    state(case)
    fine = answer.startswith("client")
    assert case.ask(*request_.split()) == ("" if fine else "error: ") + answer
    assert case.requests.take() == ([RegroupRequested()] if fine else [])
    joins = request_.startswith("join") and fine
    record = case.registry.read("j")
    assert record is not None
    assert [host.id for host in record.joined] == ([3] if joins else [])
    assert case.site.released == ([3] if case.site.reached and not joins else [])


def test_a_job_with_as_many_workers_as_virtual_workers_takes_no_more() -> None:
    answer = Case(virtual_workers=2).ask("join", "node5")
    assert answer == (
        "error: the job has 2 virtual workers, too few for 3 workers; start a job that hosts may "
        "join with --virtual_workers"
    )


@pytest.mark.parametrize(
    ("min_workers", "hosts", "why"),
    [
        (1, (0, 1), "client 0 (node0), client 1 (node1) is the last host of the job; poseidon"),
        (2, (1,), "without client 1 (node1) the job has fewer workers than --elastic=min_workers"),
        (1, (1,), ""),
        (2, (2,), ""),
    ],
)
def test_hosts_that_are_asked_to_end(min_workers: int, hosts: tuple[int, ...], why: str) -> None:
    case = Case(min_workers=min_workers)
    leaving = [host for host in case.site.hosts if host.id in hosts]
    assert case.changes._asked_to_end(leaving) == (not why)
    assert case.changes.leaving == (frozenset() if why else frozenset(hosts))
    assert why in case.said[0]


def test_the_second_of_two_hosts_stays() -> None:
    case = Case()
    assert case.changes._asked_to_end(case.site.hosts[:1])
    assert not case.changes._asked_to_end(case.site.hosts[1:2])
    assert case.changes.leaving == {0}
    case.requests.forget_regroup()
    case.changes.on_started()  # of a start that was under way
    assert case.requests.take() == [RegroupRequested()]


def test_a_host_that_is_to_leave_stays_where_the_others_were_lost_meanwhile() -> None:
    case = Case()
    assert case.changes._asked_to_end(case.site.hosts[:1])
    case.requests.forget_regroup()
    case.site.go_on([case.site.hosts[0], case.site.hosts[2]])
    case.changes.on_started()
    assert case.changes.leaving == frozenset()
    assert case.requests.take() == []
    assert case.said[-1].startswith("client 0 (node0) cannot leave, and stays: client 0 (node0) is")


@pytest.mark.parametrize("most", [1, 2])
def test_a_lost_host_is_tried_again(most: int) -> None:
    case = Case(max_rejoins=most)
    changes, site = case.changes, case.site
    site.go_on(site.hosts[:1] + site.hosts[2:])
    site.lacks = "no route to node1"
    for now_s in (0.0, 0.5, 1.0, 2.5):  # due at once, after one second, then after two
        changes.try_next(now_s)
    assert site.reached == [1, 1]
    site.lacks = ""
    for turn in range(most + 2):
        changes.try_next(3.0 + turn)
    assert site.reached == [1, 1, *most * [1]]
    assert case.said == [
        "client 1 (node1) is not back: no route to node1",
        f"client 1 (node1) was lost more often than --elastic=max_rejoins={most} allows; the job "
        "continues without it",
    ]
