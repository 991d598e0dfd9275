"""The clients of a job on Ray's nodes: which there are, what they ask for, and where they are
after a loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.host_checks import HostNeeds
from poseidon.cluster.machinefile import Host, HostRole
from poseidon.cluster.ray.resources import RayNode, Resources
from poseidon.cluster.ssh.channel import Finished
from poseidon.errors import JobError, UsageError
from poseidon.launch import ray_site
from poseidon.launch.ray_site import RaySite
from poseidon.launch.request import JobRequest, LauncherKind
from poseidon.launch.ssh_site import site_of


def _request(**fields: Any) -> JobRequest:
    return JobRequest(launcher=LauncherKind.RAY, **fields)


class FakeConnection:
    """A connection to a node that answers until it is closed."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.alive = True

    def run(self, argv: Sequence[str], *, timeout_s: float) -> Finished:
        if not self.alive:
            raise JobError("no answer")
        return Finished(status=0, stdout=b"", stderr=b"")

    def close(self) -> None:
        self.alive = False


class FakeCluster:
    """A cluster that places every client, in order, on nodes 10.0.0.1, 10.0.0.2, ..."""

    def __init__(self, places: bool = True) -> None:
        self.nodes = tuple(
            RayNode(id=str(number), address=f"10.0.0.{number}", name=f"node{number}", resources={})
            for number in range(1, 5)
        )
        self.requested: list[Mapping[int, Resources]] = []
        self.lost: set[int] = set()
        self.timeouts_s: list[float] = []
        self.places = places
        self._free = iter(self.nodes)

    def request(self, bundles: Mapping[int, Resources]) -> None:
        self.requested.append(bundles)

    def placed(self, timeout_s: float) -> bool:
        return self.places

    def describe_lack(self) -> str:
        return "3 clients need a node each"

    def connect(self, labels: Mapping[int, str], timeout_s: float) -> dict[int, Any]:
        self.timeouts_s.append(timeout_s)
        return {
            client: JobError(f"{label}: no node")
            if client in self.lost
            else (FakeConnection(label), next(self._free))
            for client, label in labels.items()
        }

    def close(self) -> None: ...


def _prepared(
    request: JobRequest,
    monkeypatch: pytest.MonkeyPatch,
    *,
    devices: tuple[int, ...] = (),
    places: bool = True,
) -> tuple[RaySite, FakeCluster]:
    cluster = FakeCluster(places)
    monkeypatch.setattr(ray_site, "connect_to_cluster", lambda address: cluster)
    monkeypatch.setattr(
        "poseidon.launch.remote_site.check_hosts",
        lambda checks: {need.id: need.addresses[0] for check in checks for need in check.needs},
    )
    site = RaySite(request)
    site.prepare(
        lambda host: HostNeeds(id=host.id, addresses=(), devices=devices if host.works else ())
    )
    return site, cluster


def test_the_flags_name_the_clients() -> None:
    site = site_of(_request(clients=2, servers=1))
    assert isinstance(site, RaySite)
    roles = [HostRole.BOTH, HostRole.BOTH, HostRole.SERVER]
    assert site.hosts == tuple(
        Host(id=number, address="any", port=0, role=role) for number, role in enumerate(roles)
    )


@pytest.mark.parametrize(
    ("fields", "devices", "works", "serves"),
    [
        ({}, (), {"CPU": 1.0}, {"CPU": 1.0}),
        ({"num_app_threads": 2, "threads": 3}, (), {"CPU": 6.0}, {"CPU": 1.0}),
        ({"num_comm_channels_per_client": 2}, (0, 1), {"CPU": 2.0, "GPU": 2.0}, {"CPU": 2.0}),
        (
            {"ray_resources": "CPU=8,big=1", "ray_server_resources": "shards=1"},
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
    site, cluster = _prepared(
        _request(clients=2, servers=1, **fields), monkeypatch, devices=devices
    )
    assert cluster.requested == [{0: works, 1: works, 2: serves}]
    assert [host.socket_address for host in site.hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert site.recorded_hosts == (), "poseidon kill asks no node over SSH"


def test_ray_numbers_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        _prepared(_request(clients=1), monkeypatch, devices=(2, 3))
    assert str(caught.value) == (
        "client 0 has GPUs 2,3; Ray assigns GPUs and numbers them from 0, so 2 of them are 0,1"
    )


@pytest.mark.parametrize("flag", ["ray_resources", "ray_server_resources"])
def test_a_client_that_asks_for_nothing_is_refused(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"--{flag}: a client asks for nothing of its node"):
        _prepared(_request(servers=1, **{flag: "CPU=0"}), monkeypatch)


def test_a_machinefile_names_roles_and_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("0 any 0\n1 node3 0\n2 any 0 role=server\n")
    _, cluster = _prepared(_request(hostfile=str(tmp_path / "hosts")), monkeypatch)
    assert cluster.requested == [
        {0: {"CPU": 1.0}, 1: {"CPU": 1.0, "node:10.0.0.3": 0.001}, 2: {"CPU": 1.0}}
    ]


def test_options_of_ssh_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("0 any 0\n1 any 0 user=ml\n")
    with pytest.raises(UsageError, match="hosts: client 1 has user=ml, which is for SSH"):
        RaySite(_request(hostfile=str(tmp_path / "hosts")))


def test_too_few_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError) as caught:
        _prepared(_request(clients=3, ray_timeout=7.0), monkeypatch, places=False)
    assert str(caught.value).startswith(
        "3 clients need a node each; after 7 s (--ray_timeout) they have none"
    )
    assert capsys.readouterr().err == "waiting up to 7 s for nodes: 3 clients need a node each\n"


def test_a_lost_client_gets_another_node_and_all_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, cluster = _prepared(_request(clients=2), monkeypatch)
    site._connections[1].close()
    checked: list[int] = []
    monkeypatch.setattr(site, "check", lambda needs: checked.append(1))
    cluster.lost = {1}
    for _ in range(2):
        with pytest.raises(JobError, match="client 1: no node"):
            site._reconnect()
    assert checked == []
    cluster.lost, cluster.places = set(), False
    with pytest.raises(
        JobError,
        match="client 1: no node of the Ray cluster within 15 s; 3 clients need a node each",
    ):
        site._reconnect()
    cluster.places = True
    site._reconnect()
    assert [host.address for host in site.hosts] == ["10.0.0.1", "10.0.0.3"]
    assert cluster.timeouts_s == [300.0, 60.0, 60.0, 60.0], (
        "a new node of an autoscaler may take long at the start"
    )
    assert checked == [1] and len(cluster.requested) == 1
    site._reconnect()
    assert checked == [1], "nothing has changed"


def test_a_job_that_goes_on_with_fewer_clients_requests_fewer_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, cluster = _prepared(_request(clients=3), monkeypatch)
    site._connections[2].close()
    assert [host.id for host in site.drop_missing()] == [2]
    assert [sorted(bundles) for bundles in cluster.requested] == [[0, 1, 2], [0, 1]]
    assert not any(connection.alive for connection in site._connections.values())
