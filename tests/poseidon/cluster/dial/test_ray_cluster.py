"""How a launcher connects to a Ray cluster, and what it reports of one that is not there."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial import ray_cluster
from poseidon.cluster.dial.ray_cluster import RayCluster, connect_to_cluster
from poseidon.errors import JobError, UsageError


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'poseidon[ray]'")):
        connect_to_cluster(None)


@pytest.mark.needs("ray")
@pytest.mark.processes
def test_a_call_without_a_connection_starts_no_cluster() -> None:
    """The threads that carry messages may call Ray after `close`."""
    calls = (
        "from poseidon.cluster.dial.ray_cluster import connect_to_cluster; import contextlib\n"
        "with contextlib.suppress(Exception): connect_to_cluster('node0')\n"
        "import ray\n"
        "with contextlib.suppress(Exception): ray.kill(None)\n"
        "print(ray.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", calls], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("address", ["node0", "node0:port", ":6379", "ray://node0:10001"])
def test_an_address_that_is_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(UsageError, match=f"--launcher=ray:address={address}: expected host:port"):
        connect_to_cluster(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=f"^RAY_ADDRESS={address}: expected host:port"):
        connect_to_cluster(None)


def test_the_current_folder_is_not_on_the_path_of_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts the folder in which `init` is called before Python's own library."""
    folders: list[str] = []
    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(init=lambda **_: folders.append(os.getcwd()))
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    connect_to_cluster(None)
    assert (folders, Path.cwd()) == (["/"], tmp_path)


def test_no_cluster_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"no Ray cluster was reached at {address}.* refused"):
            connect_to_cluster(address)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_another_server_at_the_address(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """Ray itself would try without end."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(ray_cluster, "LISTEN_S", 0.2 if not answer else ray_cluster.LISTEN_S)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            peer, _ = server.accept()
            with peer, contextlib.suppress(ConnectionResetError):
                peer.sendall(answer)
                while peer.recv(1024):
                    pass

        served = pool.submit(serve)
        with pytest.raises(UsageError, match="what listens there is not the head of a Ray"):
            connect_to_cluster(f"127.0.0.1:{server.getsockname()[1]}")
        served.result()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionError("Could not find any\nmore"), "no Ray cluster was reached on this machine"),
        (RuntimeError("Version mismatch: The\nmore"), "the Ray cluster and this launcher do not"),
    ],
)
def test_what_ray_refuses(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        assert options["address"] == "auto"
        raise error

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError) as caught:
        connect_to_cluster(None)
    assert str(caught.value).startswith(text)


class FakeRay:
    """The functions of Ray that place and start actors; `describe` decides how an actor starts."""

    def __init__(self, describe: Any) -> None:
        self._describe = describe
        self.options: dict[str, Any] = {}
        self.killed = 0

    def nodes(self) -> list[dict[str, Any]]:
        common = {
            "NodeManagerAddress": "10.0.0.1",
            "NodeManagerHostname": "node1",
            "Resources": {"CPU": 2.0},
        }
        return [{"NodeID": "a", "Alive": True, **common}, {"NodeID": "b", "Alive": False, **common}]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def remote(self, **options: Any) -> Any:
        self.options = options
        handle = SimpleNamespace(describe=SimpleNamespace(remote=lambda: "described"))
        return lambda kind: SimpleNamespace(remote=lambda: handle)

    def wait(self, calls: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return (calls, []) if self._describe else ([], calls)

    def get(self, call: str) -> dict[str, Any]:
        if isinstance(self._describe, Exception):
            raise self._describe
        return dict(self._describe)

    def kill(self, actor: object, no_restart: bool) -> None:
        self.killed += 1


@pytest.mark.needs("ray")
@pytest.mark.parametrize(
    ("describe", "text"),
    [
        (
            None,
            r"no node of the Ray .* within 3 s; .* CPU=2, shards=1; .* free of all that is CPU=1",
        ),
        (
            ValueError("The actor died\n  ModuleNotFoundError: No module named 'poseidon'"),
            "Ray's Python on its node has no module 'poseidon'; install",
        ),
        (ValueError("The actor died\nmore"), "its Ray actor could not start: The actor died$"),
        ({"node": "b"}, "its node was lost while it started"),
    ],
)
def test_an_actor_that_does_not_start(describe: Any, text: str) -> None:
    ray = FakeRay(describe)
    cluster = RayCluster(ray)
    cluster._bundles, cluster._position = {0: {"CPU": 2.0, "shards": 1.0}}, {0: 0}
    outcome = cluster.start_actors({0: "client 0"}, object, ("put", "get"), 3.0, _no_agent)[0]
    assert isinstance(outcome, JobError) and re.match(f"client 0: {text}", str(outcome))
    assert ray.killed == 1
    assert (ray.options["num_cpus"], ray.options["num_gpus"]) == (2.0, 0)
    assert ray.options["resources"] == {"shards": 1.0}
    assert (ray.options["max_restarts"], ray.options["max_task_retries"]) == (0, 0)
    assert ray.options["concurrency_groups"] == {"put": 1, "get": 1}


def _no_agent(client: int, label: str, actor: object, facts: Mapping[str, Any]) -> RemoteAgent:
    raise AssertionError(label)


@pytest.mark.needs("ray")
@pytest.mark.parametrize("fails", [False, True])
def test_an_actor_that_starts_gets_an_agent(fails: bool) -> None:
    ray = FakeRay({"node": "a", "version": "1"})
    cluster = RayCluster(ray)
    cluster._bundles, cluster._position = {5: {"CPU": 2.0}}, {5: 0}
    error, agent = JobError("another version"), object()

    def agent_of(client: int, label: str, actor: object, facts: Mapping[str, Any]) -> Any:
        assert (client, label) == (5, "client 5 on node1")
        assert facts == {"node": "a", "version": "1"}
        if fails:
            raise error
        return agent

    outcomes = cluster.start_actors({5: "client 5"}, object, ("put", "get"), 3.0, agent_of)
    assert outcomes == {5: error if fails else (agent, cluster.nodes[0])}
    assert ray.killed == fails, "no actor stays without an agent"


def test_only_nodes_that_are_alive_count() -> None:
    assert [node.id for node in RayCluster(FakeRay(None)).nodes] == ["a"]


def test_a_wait_for_nodes_is_short_pieces_so_that_signals_are_handled() -> None:
    waits: list[int] = []

    def wait(timeout_s: int) -> bool:
        waits.append(timeout_s)
        return len(waits) == 3

    cluster = RayCluster(FakeRay(None))
    cluster._group = SimpleNamespace(wait=wait)
    assert cluster.placed(300.0)
    assert waits == [1] * 3, "Ray drops a fraction of a second"
    assert all(isinstance(timeout_s, int) for timeout_s in waits)
    assert not cluster.placed(0.0)


def test_a_job_that_ray_has_ended_is_an_error() -> None:
    def wait(timeout_s: float) -> bool:
        raise RuntimeError("Placement group PlacementGroupID(11) does not exist.")

    cluster = RayCluster(FakeRay({}))
    cluster._group = SimpleNamespace(wait=wait)
    with pytest.raises(JobError, match=r"^Ray has ended this job \(Placement group .*\)"):
        cluster.placed(300.0)
