"""Agents in actors of Ray, and where a job's clients are: placed, lost, and placed again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import poseidon
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial import ray as ray_dial
from poseidon.cluster.dial.dialer import Needs
from poseidon.cluster.dial.ray import AgentActor, RayDialer, dial_actor
from poseidon.cluster.dial.ray_cluster import reason_of
from poseidon.cluster.dial.ray_resources import RayNode, Resources
from poseidon.cluster.host_probe import HostNeeds
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import ProcessSpec
from poseidon.errors import JobError
from tests.support.polling import until
from tests.support.recording_listener import RecordingListener

LIMIT_S = 30.0
NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="a")
SLEEP = "echo $$; exec sleep 600"


class LostError(Exception):
    """What Ray raises for an actor of a dead node."""


class LocalRay:
    """Ray's functions for an actor of this process: a call runs where its answer is taken."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError)

    def __init__(self) -> None:
        self.lost = False
        self.killed = 0
        self.seen: list[object] = []
        self.actor = AgentActor()

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        if self.lost:
            raise LostError("\nThe actor died: its node has died.\nmore")
        answer = call()
        self.seen.append(answer)
        return answer

    def kill(self, actor: object, no_restart: bool) -> None:
        """End the actor's process, and the agent with its channel."""
        assert no_restart
        self.killed += 1
        self.lost = True
        self.end_of_node()

    def end_of_node(self) -> None:
        channel = getattr(self.actor, "_channel", None)
        if channel is not None:
            channel.close()


class LocalHandle:
    """A handle on an actor of this process."""

    def __init__(self, ray: LocalRay) -> None:
        self._ray = ray

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: object) -> Callable[[], Any]:
            self._ray.seen.append(arguments)
            return lambda: getattr(self._ray.actor, name)(*arguments)

        call = SimpleNamespace(remote=remote)
        call.options = lambda concurrency_group: call
        return call


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalRay]:
    """Ray; calls for messages return soon, for an actor of this process cannot be killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_dial, "POLL_S", 0.05)
    ray = LocalRay()
    yield ray
    ray.end_of_node()


def dial(
    ray: LocalRay, where: tuple[str, str, str] = ("", "", ""), version: str = poseidon.__version__
) -> RemoteAgent:
    description = {"version": version, "python": sys.executable, "public": ray.actor._own.public}
    label = "client 1 on node7"
    return dial_actor(label, LocalHandle(ray), ray, description, where)


@pytest.fixture
def agent(ray: LocalRay, tmp_path: Path) -> Iterator[RemoteAgent]:
    agent = dial(ray, ("", "", str(tmp_path)))
    yield agent
    agent.close()


def start(
    agent: RemoteAgent, *argv: str, first_line: bytes = b"", own_stdout: bool = False
) -> RecordingListener:
    listener = RecordingListener()
    spec = ProcessSpec(name=NAME, argv=argv, first_line=first_line, own_stdout=own_stdout)
    agent.start(spec, listener)
    return listener


@pytest.mark.processes
def test_a_process_gets_its_input_and_answers_and_ray_sees_none_of_it(
    agent: RemoteAgent, ray: LocalRay
) -> None:
    script = "read line; echo got $line; exit 3"
    listener = start(agent, "sh", "-c", script, first_line=b"a_secret")
    assert listener.until("exited") == [("log", "got a_secret"), ("exited", 3)]
    assert len(ray.seen) > 4
    assert "secret" not in repr(ray.seen)


@pytest.mark.processes
def test_messages_keep_their_order(agent: RemoteAgent) -> None:
    """Each seal has a number: a message out of order would end the channel.

    The process stays until all is read: what a dead process has written is waited for two seconds.
    """
    listener = RecordingListener()
    spec = ProcessSpec(
        name=NAME, argv=("sh", "-c", "read first; seq 20000; read last"), first_line=b""
    )
    process = agent.start(spec, listener)
    lines = [listener.until("log")[-1][1] for _ in range(20_000)]
    assert lines == [str(number) for number in range(1, 20_001)]
    process.send_line(b"")
    assert listener.until("exited") == [("exited", 0)]


@pytest.mark.processes
def test_a_process_has_the_environment_of_its_node_and_this_package(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("RAY_JOB_ID", "7")
    agent = dial(ray, ("", "", str(tmp_path)))
    script = (
        "import os, poseidon; print(os.environ['CUDA_VISIBLE_DEVICES'], 'RAY_JOB_ID' in os.environ)"
    )
    try:
        listener = start(agent, sys.executable, "-c", script)
        assert listener.until("exited")[-2:] == [("log", "3 False"), ("exited", 0)]
    finally:
        agent.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workdir", "launcher_folder", "expected"),
    [("work", "here", "work"), ("", "here", "here"), ("", "missing", "home"), ("~", "", "home")],
)
def test_where_a_process_runs(
    ray: LocalRay,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    workdir: str,
    launcher_folder: str,
    expected: str,
) -> None:
    for name in ("work", "here", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    named = str(tmp_path / workdir) if workdir == "work" else workdir
    agent = dial(ray, ("", named, str(tmp_path / launcher_folder)))
    try:
        listener = start(agent, "pwd")
        assert listener.until("log")[-1] == ("log", str(tmp_path / expected))
        assert Path.cwd() == tmp_path / expected, "definitions are checked there, too"
    finally:
        agent.close()


def test_a_workdir_that_is_missing(ray: LocalRay) -> None:
    with pytest.raises(JobError) as caught:
        dial(ray, ("", "/no/such/folder", "/"))
    assert "client 1 on node7: " in str(caught.value)
    assert "workdir=/no/such/folder is not a folder there" in str(caught.value)


@pytest.mark.processes
def test_processes_run_with_the_interpreter_of_the_machinefile(
    ray: LocalRay, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho this one with "$@"\n')
    interpreter.chmod(0o755)
    agent = dial(ray, (str(interpreter), "", str(tmp_path)))
    try:
        listener = start(agent, sys.executable, "-m", "x")
        assert listener.until("log")[-1] == ("log", "this one with -m x")
    finally:
        agent.close()


@pytest.mark.processes
def test_a_lost_node_ends_all_that_waits(agent: RemoteAgent, ray: LocalRay) -> None:
    listener = start(agent, "sh", "-c", SLEEP)
    pid = int(str(listener.until("log")[-1][1]))
    assert agent.lost is None
    ray.lost = True
    *_, (_, event), (_, status) = listener.until("exited")
    assert isinstance(event, dict)
    assert event["host_lost"] and event["message"].startswith("client 1 on node7: ")
    assert status == 1
    with pytest.raises(JobError, match="client 1 on node7: "):
        agent.read_file("/", lambda part: None)
    with pytest.raises(JobError, match="client 1 on node7: "):
        start(agent, "true")
    until(lambda: ray.killed > 0, "its actor is not ended", LIMIT_S)
    until(lambda: not psutil.pid_exists(pid), "its process runs on", LIMIT_S)


@pytest.mark.processes
def test_closing_ends_the_processes_and_the_actor(agent: RemoteAgent, ray: LocalRay) -> None:
    pid = int(str(start(agent, "sh", "-c", SLEEP).until("log")[-1][1]))
    agent.close()
    assert not psutil.pid_exists(pid)
    until(lambda: ray.killed > 0, "its actor is not ended", LIMIT_S)


def test_what_was_changed_on_its_way_ends_the_channel(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.cluster.agent.connection.HEARTBEAT_S", 0.1)
    agent = dial(ray, ("", "", "/"))
    get = ray.actor.get

    def changed(timeout_s: float) -> list[bytes] | None:
        packet = get(timeout_s)
        return packet and [*packet[:-1], packet[-1][:-1] + bytes([packet[-1][-1] ^ 1])]

    monkeypatch.setattr(ray.actor, "get", changed)
    until(lambda: agent.lost is not None, "it was taken all the same", LIMIT_S)
    agent.close()


def test_another_version_is_refused(ray: LocalRay) -> None:
    with pytest.raises(JobError) as caught:
        dial(ray, version="9.9")
    assert str(caught.value).startswith("client 1 on node7")
    assert f"and {poseidon.__version__} at the launcher" in str(caught.value)


def test_a_node_that_is_lost_while_its_agent_is_opened(ray: LocalRay) -> None:
    ray.lost = True
    with pytest.raises(JobError) as caught:
        dial(ray)
    assert "client 1 on node7: its Ray actor is lost: The actor died" in str(caught.value)


def test_an_actor_that_does_not_answer(ray: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(call: object, timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(JobError, match=r"client 1 on node7: .* no answer within 60 s"):
        dial(ray)


@pytest.mark.parametrize(
    ("error", "text"), [(LostError("\n  first \nsecond"), "first"), (LostError(), "LostError")]
)
def test_an_error_of_ray_becomes_one_line(error: Exception, text: str) -> None:
    assert reason_of(error) == text


class FakeCluster:
    """A cluster that places every client, in order, on nodes 10.0.0.1, 10.0.0.2, ..."""

    ray = None

    def __init__(self) -> None:
        self.nodes = tuple(
            RayNode(id=str(number), address=f"10.0.0.{number}", name=f"node{number}", resources={})
            for number in range(1, 5)
        )
        self.requested: list[Mapping[int, Resources]] = []
        self.lost: set[int] = set()
        self.timeouts_s: list[float] = []
        self.places = True
        self.closed = 0
        self._free = iter(self.nodes)

    def request(self, bundles: Mapping[int, Resources]) -> None:
        self.requested.append(bundles)

    def placed(self, timeout_s: float) -> bool:
        return self.places

    def describe_lack(self) -> str:
        return "2 clients need a node each"

    def start_actors(
        self, labels: Mapping[int, str], kind: type, calls: object, timeout_s: float, agent_of: Any
    ) -> dict[int, Any]:
        assert kind is AgentActor
        self.timeouts_s.append(timeout_s)
        found: dict[int, Any] = {}
        for client, label in labels.items():
            if client in self.lost:
                found[client] = JobError(f"{label}: no node")
            else:
                node = next(self._free)
                facts = {"version": poseidon.__version__}
                found[client] = (agent_of(client, f"{label} on {node.name}", "actor", facts), node)
        return found

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()
    monkeypatch.setattr(ray_dial, "connect_to_cluster", lambda address: cluster)
    monkeypatch.setattr(
        ray_dial,
        "dial_actor",
        lambda label, actor, ray, description, where: SimpleNamespace(label=label, where=where),
    )
    return cluster


HOSTS = (
    Host(id=0, address="any", port=0, python="~/python"),
    Host(id=1, address="node3", port=0, workdir="/data"),
)


def dialer_of(warn: Callable[[str], object] = print, timeout_s: float = 300.0) -> RayDialer:
    return RayDialer(
        HOSTS,
        address="10.0.0.1:6379",
        timeout_s=timeout_s,
        folder="/here",
        resources=lambda host, needs: {"CPU": 2.0 + len(needs(host).devices)},
        warn=warn,
    )


def needs_of(host: Host) -> HostNeeds:
    return HostNeeds(id=host.id, addresses=(), devices=(0,) * host.id)


NEEDS: Needs = needs_of


def test_clients_are_placed_and_dialled(cluster: FakeCluster) -> None:
    dialer = dialer_of()
    dialer.place(HOSTS, NEEDS)
    assert cluster.requested == [{0: {"CPU": 2.0}, 1: {"CPU": 3.0, "node:10.0.0.3": 0.001}}]
    agents: Any = dialer.dial(HOSTS, "j")
    assert [agents[client].label for client in (0, 1)] == ["client 0 on node1", "client 1 on node2"]
    assert [agents[0].where, agents[1].where] == [("~/python", "", "/here"), ("", "/data", "/here")]
    located = dialer.located(HOSTS)
    assert [host.address for host in located] == ["10.0.0.1", "10.0.0.2"]
    assert dialer.located(located) == located
    assert [dialer.cores(host, 64) for host in located] == [2, 3]
    assert dialer.cores(located[1], 1) == 1, "the node has fewer"
    dialer.close()
    dialer.close()
    assert cluster.closed == 1


def test_too_few_nodes(cluster: FakeCluster) -> None:
    cluster.places = False
    warnings: list[str] = []
    with pytest.raises(JobError) as caught:
        dialer_of(warnings.append, timeout_s=7.0).place(HOSTS, NEEDS)
    assert str(caught.value).startswith("2 clients need a node")
    assert warnings == ["waiting up to 7 s for nodes: 2 clients need a node each"]


def test_a_lost_client_gets_another_node(cluster: FakeCluster) -> None:
    dialer = dialer_of()
    dialer.place(HOSTS, NEEDS)
    dialer.dial(HOSTS, "j")
    cluster.lost = {1}
    assert str(dialer.dial(HOSTS[1:], "j")[1]) == "client 1: no node"
    cluster.lost, cluster.places = set(), False
    assert "client 1: no node of the Ray cluster within 15" in str(dialer.dial(HOSTS[1:], "j")[1])
    cluster.places = True
    found = dialer.dial(HOSTS[1:], "j")
    assert list(found) == [1]
    assert [host.address for host in dialer.located(HOSTS)] == ["10.0.0.1", "10.0.0.3"]
    assert cluster.timeouts_s == [300.0, 60.0, 60.0], (
        "a new node of an autoscaler may take long at the start"
    )
    assert len(cluster.requested) == 1


def test_a_job_that_goes_on_with_fewer_clients_requests_fewer_nodes(cluster: FakeCluster) -> None:
    dialer = dialer_of()
    dialer.place(HOSTS, NEEDS)
    cluster.places = False
    dialer.place(HOSTS[:1], NEEDS)
    assert [sorted(bundles) for bundles in cluster.requested] == [[0, 1], [0]]


def test_how_ray_s_hosts_differ() -> None:
    dialer = dialer_of()
    assert dialer.takes_files and dialer.moves
    assert not (dialer.here or dialer.given)
