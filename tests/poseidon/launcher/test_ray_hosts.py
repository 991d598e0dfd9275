"""The clients of a job on Ray's nodes: which there are, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.dial import ray as ray_dial
from poseidon.cluster.dial.ray_resources import RayNode, Resources
from poseidon.cluster.host_probe import HostNeeds
from poseidon.cluster.machinefile import Host, HostRole
from poseidon.errors import JobError, UsageError
from poseidon.launcher.ray_hosts import ray_dialer, ray_hosts
from poseidon.launcher.request import JobRequest, LauncherKind


def request_of(**fields: Any) -> JobRequest:
    return JobRequest(launcher=LauncherKind.RAY, **fields)


class FakeCluster:
    """A cluster of four nodes; `places` says whether it has room."""

    def __init__(self, places: bool) -> None:
        self.nodes = tuple(
            RayNode(id=str(number), address=f"10.0.0.{number}", name=f"node{number}", resources={})
            for number in range(1, 5)
        )
        self.requested: list[Mapping[int, Resources]] = []
        self.places = places

    def request(self, bundles: Mapping[int, Resources]) -> None:
        self.requested.append(bundles)

    def placed(self, timeout_s: float) -> bool:
        return self.places

    def describe_lack(self) -> str:
        return "3 clients need a node each"


def requested(
    request: JobRequest,
    monkeypatch: pytest.MonkeyPatch,
    *,
    devices: tuple[int, ...] = (),
    places: bool = True,
) -> list[Mapping[int, Resources]]:
    """Place the clients of a job; return what was asked of the cluster."""
    cluster = FakeCluster(places)
    monkeypatch.setattr(ray_dial, "connect_to_cluster", lambda address: cluster)
    hosts = ray_hosts(request)
    ray_dialer(request, hosts).place(
        hosts,
        lambda host: HostNeeds(id=host.id, addresses=(), devices=devices if host.works else ()),
    )
    return cluster.requested


def test_a_client_asks_for_a_cpu_for_each_worker_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    file.write_text("0 any 0 workers=3\n1 any 0\n", encoding="utf-8")
    request = request_of(hostfile=str(file))
    assert requested(request, monkeypatch) == [{0: {"CPU": 3.0}, 1: {"CPU": 1.0}}]


def test_the_flags_name_the_clients() -> None:
    roles = [HostRole.BOTH, HostRole.BOTH, HostRole.SERVER]
    assert ray_hosts(request_of(clients=2, servers=1)) == tuple(
        Host(id=number, address="any", port=0, role=role) for number, role in enumerate(roles)
    )


@pytest.mark.parametrize(
    ("fields", "devices", "works", "serves"),
    [
        ({}, (), {"CPU": 1.0}, {"CPU": 1.0}),
        ({"workers": 2, "threads": 3}, (), {"CPU": 6.0}, {"CPU": 1.0}),
        ({"shards": 2}, (0, 1), {"CPU": 2.0, "GPU": 2.0}, {"CPU": 2.0}),
        (
            {"ray_resources": "CPU=8+big=1", "ray_server_resources": "shards=1"},
            (),
            {"CPU": 8.0, "big": 1.0},
            {"CPU": 1.0, "shards": 1.0},
        ),
    ],
)
def test_what_a_client_asks_of_its_node(
    fields: dict[str, Any],
    devices: tuple[int, ...],
    works: Resources,
    serves: Resources,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_of(clients=2, servers=1, **fields)
    assert requested(request, monkeypatch, devices=devices) == [{0: works, 1: works, 2: serves}]


def test_ray_numbers_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        requested(request_of(clients=1), monkeypatch, devices=(2, 3))
    assert str(caught.value) == (
        "client 0 has GPUs 2,3; Ray assigns GPUs and numbers them from 0, so 2 of them are 0,1"
    )


@pytest.mark.parametrize("flag", ["ray_resources", "ray_server_resources"])
def test_a_client_that_asks_for_nothing_is_refused(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = flag.removeprefix("ray_")
    with pytest.raises(
        UsageError, match=f"--launcher=ray:{name}: a client must ask for a resource"
    ):
        requested(request_of(servers=1, **{flag: "CPU=0"}), monkeypatch)


def test_a_machinefile_names_roles_and_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("0 any 0\n1 node3 0\n2 any 0 role=server\n")
    assert requested(request_of(hostfile=str(tmp_path / "hosts")), monkeypatch) == [
        {0: {"CPU": 1.0}, 1: {"CPU": 1.0, "node:10.0.0.3": 0.001}, 2: {"CPU": 1.0}}
    ]


@pytest.mark.parametrize("option", ["user=ml", "ssh_port=2222"])
def test_options_of_ssh_are_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "hosts").write_text(f"0 any 0\n1 any 0 {option}\n")
    with pytest.raises(UsageError, match=f"hosts: client 1 has {option}, which is for SSH"):
        ray_hosts(request_of(hostfile=str(tmp_path / "hosts")))


def test_too_few_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match=r"; after 7 s \(--launcher=ray:timeout\) they have none"):
        requested(request_of(clients=3, ray_timeout=7.0), monkeypatch, places=False)
    assert capsys.readouterr().err == "waiting up to 7 s for nodes: 3 clients need a node each\n"
