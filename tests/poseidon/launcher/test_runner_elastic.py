"""Jobs whose processes outlive the loss of others: real processes, which compute nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from poseidon.base.settings import read_settings
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.dial.channel import StreamChannel
from poseidon.cluster.dial.dialer import Dialer, LocalDialer
from poseidon.cluster.job_plan import ProcessName, Role, ShardPlan, WorkerPlan
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.cluster.machinefile import Host, parse_machinefile
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.cluster.supervision.background import StartReport
from poseidon.cluster.supervision.loop import JobListener
from poseidon.engine.document import JobDocument, WorkKind
from poseidon.errors import JobError
from poseidon.launcher import runner
from poseidon.launcher.job import Job
from poseidon.launcher.listeners import Listeners
from poseidon.launcher.processes import Start
from poseidon.launcher.request import Balance, JobRequest
from poseidon.launcher.runner import run
from poseidon.launcher.site import Site
from ps_server.json_fields import fields_of
from tests.support.elastic_child import ELASTIC_SHARD, ELASTIC_WORKER
from tests.support.job_child import child
from tests.support.live_processes import live_pids, none_left

pytestmark = pytest.mark.processes


class ElasticJob(Job):
    """A job of processes that compute nothing."""

    kind = WorkKind.SOLVER
    restarts_by_itself = True
    fixed_because = ""

    def document(self, role: WorkerPlan, start: Start) -> JobDocument:
        document = replace(self.worker_document(role, start), copies=1)
        return JobDocument(**fields_of(document), solver="none")

    def spec(self, role: WorkerPlan | ShardPlan, start: Start) -> ProcessSpec:
        script = ELASTIC_SHARD if isinstance(role, ShardPlan) else ELASTIC_WORKER
        spec = super().spec(role, start)
        return replace(spec, argv=child(script, "--job", self.id), imports=())

    def import_ahead(self) -> Sequence[threading.Event]:
        return ()

    def shares_data(self) -> bool:
        return True

    def usual_virtual_workers(self, plan: object) -> int:
        return self.virtual

    virtual = 3


class Watch(JobListener):
    """Acts on the progress of a job, and notes its processes."""

    def __init__(self, job: ElasticJob, acts: list[Callable[[Watch], object]]) -> None:
        self._job = job
        self._acts, self._all = acts, list(acts)
        self.starts: list[dict[str, int]] = []
        """Of each start that runs, the pids of its processes by their names."""
        self.iterations: list[int] = []
        self.pids: set[int] = set()

    def on_started(self) -> None:
        record = Registry(read_settings().state_folder).read(self._job.id)
        assert record is not None
        self.starts.append({one.name.split(" (")[0]: one.pid for one in record.processes})
        self.pids |= {one.pid for one in record.processes}

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if event["event"] == "progress" and name.role is Role.WORKER and name.index == 0:
            iteration = event["iteration"]
            assert isinstance(iteration, int)
            self.iterations.append(iteration)
        acted = len(self._all) - len(self._acts)
        if acted < len(self.starts) == len(self.iterations):
            self._acts.pop(0)(self)

    def kill(self, *names: str) -> None:
        for name in names:
            os.kill(self.starts[-1][name], signal.SIGKILL)


def run_job(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *acts: Callable[[Watch], object],
    max_rejoins: int = 0,
    dialer: Dialer | None = None,
    balance: Balance = Balance(),  # noqa: B008 - it is frozen
) -> Watch:
    """Run a job of three clients on this machine; each act follows the progress of a start.

    Args:
        monkeypatch: of the test.
        tmp_path: of the test.
        acts: what they do.
        max_rejoins: how often a client is taken in again.
        dialer: of the clients; None: one agent for all, in this process.
        balance: of the clients.
    """
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    hosts = parse_machinefile("0 127.0.0.1 0\n1 127.0.0.1 0\n2 127.0.0.1 0", source="hosts")
    request = JobRequest(
        output=tmp_path / "out", max_restarts=1, max_rejoins=max_rejoins, balance=balance
    )
    site = Site(hosts, dialer or LocalDialer())
    job = ElasticJob(request, site, title="elastic", stem="elastic", devices=("cpu",))
    watch = Watch(job, list(acts))
    monkeypatch.setattr(runner, "Listeners", lambda *all_: Listeners(*all_, watch))
    run(job, StartReport(None))
    assert not live_pids(watch.pids)
    return watch


class AgentProcesses(Dialer):
    """Agents that are processes of their own, as on other machines."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._pids: dict[int, int] = {}
        self._remotes: dict[int, RemoteAgent] = {}

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        return {host.id: self._start(host) for host in hosts}

    def _start(self, host: Host) -> RemoteAgent:
        words = [sys.executable, "-m", "poseidon.cluster.agent"]
        agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert agent.stdin is not None and agent.stdout is not None
        self._started.append(agent)
        self._pids[host.id] = agent.pid
        outlet = os.dup(agent.stdin.fileno())
        agent.stdin.close()
        channel = StreamChannel.of_pipes(agent.stdout.fileno(), outlet)
        remote = self._remotes[host.id] = RemoteAgent(channel, f"host {host.id}")
        remote.connect()
        return remote

    def shut_down(self, host: int) -> None:
        """Send SIGTERM to all processes of a host, as a machine that shuts down does."""
        agent = psutil.Process(self._pids[host])
        for process in (*agent.children(recursive=True), agent):
            process.terminate()

    def cut(self, host: int) -> int:
        """Let nothing pass between the launcher and the agent of a host, which is taken for lost;
        return the pid of the agent.
        """
        os.kill(self._pids[host], signal.SIGSTOP)
        self._remotes[host]._lose("it has sent nothing for 10 s")
        return self._pids[host]

    def statuses(self) -> list[int]:
        """Return the exit statuses of all agents."""
        statuses = []
        for agent in self._started:
            statuses.append(agent.wait(30))
            assert agent.stdout is not None
            agent.stdout.close()
        return statuses


def stop(watch: Watch) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def nothing(watch: Watch) -> None:
    """The job regroups by itself."""


def test_a_process_that_was_killed_is_replaced_beside_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = run_job(
        monkeypatch,
        tmp_path,
        lambda watch: watch.kill("worker 0"),
        nothing,
        lambda watch: watch.kill("worker 2"),  # the same client, whose rank is the last now
        stop,
        max_rejoins=1,
    )
    first, second, third, fourth = watch.starts
    assert (len(second), len(third), len(fourth)) == (4, 6, 4)
    kept = {"worker 0": first["worker 1"], "worker 1": first["worker 2"]}
    for later in (second, third, fourth):
        assert {name: later[name] for name in kept} == kept
    assert third["worker 2"] not in first.values()
    said = capsys.readouterr().err
    assert "continuing from iteration 2, with client 0 (127.0.0.1): 3 clients, 3 workers, 3" in said


def test_virtual_workers_move_to_faster_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All processes go on; the loss of one keeps the speeds."""
    documents: list[dict[str, object]] = []
    spec = ElasticJob.spec

    def noted(job: ElasticJob, role: WorkerPlan | ShardPlan, start: Start) -> ProcessSpec:
        made = spec(job, role, start)
        if isinstance(role, WorkerPlan):
            documents.append(json.loads(made.first_line))
        return made

    monkeypatch.setattr(ElasticJob, "virtual", 11)
    monkeypatch.setattr(ElasticJob, "spec", noted)
    watch = run_job(
        monkeypatch,
        tmp_path,
        nothing,
        lambda watch: watch.kill("worker 0"),
        stop,
        balance=Balance(measured=True),
    )
    first, second, third = watch.starts
    assert first == second
    assert third["worker 0"] == first["worker 1"]
    members: list[Any] = [one["member"] for one in documents]
    placed = [one["virtual_workers"]["bounds"] for one in members if one["network"]["rank"] == 0]
    assert placed == [[0, 4, 8, 11], [0, 6, 9, 11], [0, 7, 11]]
    said = capsys.readouterr().err
    assert "the workers will compute for 6, 3, 2 virtual workers, instead of 4, 4, 3: each" in said
    assert "takes 1, 2, 3 s on the workers" in said
    assert "continuing from iteration 1, with the same clients: 3 clients, 3 workers, 11" in said


def test_a_host_leaves_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[str] = []

    def leave(watch: Watch) -> None:
        """Ask from a thread, as another process would, for three hosts, one of which can go."""
        threading.Thread(target=lambda: [answers.append(asked(host)) for host in "701"]).start()

    def asked(host: str) -> str:
        request = HostRequest(do="leave", host=host)
        files = RequestFiles(Registry(read_settings().state_folder).folder, watched[0])
        try:
            return files.ask(request, runs=lambda: True, limit_s=30.0)
        except JobError as error:
            return f"error: {error}"

    watched: list[str] = []
    monkeypatch.setattr(
        ElasticJob,
        "notes",
        lambda self: watched.append(self.id) or [],  # type: ignore[func-returns-value]
    )
    watch = run_job(monkeypatch, tmp_path, leave, nothing, stop)
    first, second, third = watch.starts
    assert second["worker 0"] == first["worker 1"]  # the second client has the snapshot, too
    assert third == {"worker 0": first["worker 2"], "shard 1": first["shard 2"]}
    assert answers == [
        "error: the job has no host 7; its clients are 0 (127.0.0.1), 1 (127.0.0.1), 2 (127.0.0.1)",
        "client 0 (127.0.0.1) leaves the job after the next iteration",
        "client 1 (127.0.0.1) leaves the job after the next iteration",
    ]
    said = capsys.readouterr().err
    assert "continuing from iteration 1, without client 0 (127.0.0.1): 2 clients" in said
    assert "repeated" not in said


def test_a_host_leaves_when_its_machine_shuts_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one cannot: it is lost, and the job restarts."""
    monkeypatch.setattr(Site, "_checked", lambda self, hosts, needs: tuple(hosts))
    dialer = AgentProcesses()
    watch = run_job(
        monkeypatch,
        tmp_path,
        lambda _: dialer.shut_down(1),
        lambda _: dialer.shut_down(0),
        lambda _: dialer.shut_down(2),
        stop,
        dialer=dialer,
    )
    first, second, third, _ = watch.starts
    assert second == {
        "worker 0": first["worker 0"],
        "worker 1": first["worker 2"],
        "shard 0": first["shard 0"],
        "shard 1": first["shard 2"],
    }
    assert third["worker 0"] == first["worker 2"]
    assert dialer.statuses() == [0, 0, 1, 0]
    said = capsys.readouterr().err
    for host in (1, 0):
        name = f"client {host} (127.0.0.1)"
        assert f"{name} was asked to end and leaves the job after the next iteration" in said
    assert "continuing from iteration 1, without client 1 (127.0.0.1): 2 clients" in said
    assert "client 2 (127.0.0.1) was asked to end, but cannot leave" in said
    assert "host 2: its agent was ended by SIGTERM; restart 1 of 1" in said
    assert "after 1 restart, at least 4 iterations repeated" in said


def test_a_host_that_was_out_of_reach_ends_its_old_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes part again with new ones."""
    monkeypatch.setattr(Site, "_checked", lambda self, hosts, needs, *alike: tuple(hosts))
    dialer, cut = AgentProcesses(), list[int]()

    def be_reached(watch: Watch) -> None:
        old = [watch.starts[0][name] for name in ("worker 1", "shard 1")]
        assert live_pids(old) == old  # they have run on
        os.kill(cut[0], signal.SIGCONT)
        assert none_left(old)
        stop(watch)

    watch = run_job(
        monkeypatch,
        tmp_path,
        lambda _: cut.append(dialer.cut(1)),
        nothing,
        be_reached,
        max_rejoins=1,
        dialer=dialer,
    )
    first, second, third = watch.starts
    assert (len(second), len(third)) == (4, 6)
    assert not {first["worker 1"], first["shard 1"]} & {*second.values(), *third.values()}
    assert dialer.statuses() == [0, 1, 0, 0]
    said = capsys.readouterr().err
    assert "host 1: it has sent nothing for 10 s; continuing from iteration 1 in memory" in said
    assert "with client 1 (127.0.0.1): 3 clients" in said


@pytest.mark.parametrize(
    ("virtual", "address", "answer"),
    [
        (4, "127.0.0.1", "client 3 (127.0.0.1) takes part from now on"),
        (
            3,
            "127.0.0.1",
            "error: the job has 3 virtual workers, too few for 4 workers; start a job that hosts "
            "may join with --virtual_workers",
        ),
        (4, "node5", "error: node5 cannot reach the job's hosts; expected 127.0.0.1"),
    ],
)
def test_a_host_joins_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, virtual: int, address: str, answer: str
) -> None:
    answers: list[str] = []
    joins = not answer.startswith("error")

    def join(watch: Watch) -> None:
        threading.Thread(target=lambda: asked(watch)).start()

    def asked(watch: Watch) -> None:
        files = RequestFiles(Registry(read_settings().state_folder).folder, watch._job.id)
        request = HostRequest(do="join", host=address)
        try:
            answers.append(files.ask(request, runs=lambda: True, limit_s=30.0))
        except JobError as error:
            answers.append(f"error: {error}")
            stop(watch)

    started: list[str] = []
    start_aside = Site.start_aside

    def note(site: Site, spec: ProcessSpec, host: Host, listener: Listener) -> RemoteProcess:
        started.append(spec.name.short)
        return start_aside(site, spec, host, listener)

    monkeypatch.setattr(ElasticJob, "virtual", virtual)
    monkeypatch.setattr(Site, "start_aside", note)
    watch = run_job(monkeypatch, tmp_path, join, *([stop] if joins else []))
    assert answers == [answer]
    assert sorted(started) == (["shard 3", "worker 3"] if joins else [])
    assert [len(start) for start in watch.starts] == ([6, 8] if joins else [6])
    for name, pid in watch.starts[0].items():
        assert watch.starts[-1][name] == pid


def test_a_host_that_cannot_connect_to_the_others_stays_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job tries once, and continues without it."""

    def join(watch: Watch) -> None:
        (watch._job.output / "apart").touch()
        files = RequestFiles(Registry(read_settings().state_folder).folder, watch._job.id)
        request = HostRequest(do="join", host="127.0.0.1")
        ask = partial(files.ask, request, runs=lambda: True, limit_s=30.0)
        threading.Thread(target=ask).start()

    def note(watch: Watch, name: ProcessName, event: Mapping[str, object]) -> None:
        on_event(watch, name, event)
        if len(watch.starts) == 3 and event["event"] == "progress":
            stop(watch)

    on_event = Watch.on_event
    monkeypatch.setattr(Watch, "on_event", note)
    monkeypatch.setattr(ElasticJob, "virtual", 4)
    watch = run_job(monkeypatch, tmp_path, join)
    assert [len(start) for start in watch.starts] == [6, 8, 6]
    assert watch.starts[0] == watch.starts[2]
    said = capsys.readouterr().err
    assert (
        said.count("client 3 (127.0.0.1) cannot take part: it could not connect to the job's") == 1
    )
    assert (
        "could not connect to shard 0; continuing from iteration 1 in memory, without client 3 "
        "(127.0.0.1): 3 clients, 3 workers, 4 virtual workers, 3 shards" in said
    )
