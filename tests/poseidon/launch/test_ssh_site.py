"""Which jobs leave this machine, and in which words the others are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from poseidon.cluster.agent.launcher import HostEnvironment
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess
from poseidon.cluster.machinefile import Host, parse_machinefile
from poseidon.cluster.name_lookup import addresses_of
from poseidon.cluster.ssh.channel import Finished
from poseidon.cluster.ssh.config import SshSettings
from poseidon.cluster.ssh.connections import connect_all
from poseidon.errors import JobError, JobInterrupted, UsageError
from poseidon.launch import remote_site, ssh_site
from poseidon.launch.request import JobRequest, LauncherKind
from poseidon.launch.site import LocalSite, Site
from poseidon.launch.ssh_site import SshSite, site_of
from tests.support.loopback_sshd import LoopbackSshd
from tests.support.polling import until


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Site]:
    """Makes the site of a machinefile and a value of --launcher."""
    monkeypatch.chdir(tmp_path)

    def make(text: str, launcher: str) -> Site:
        (tmp_path / "hosts").write_text(text)
        return site_of(JobRequest(hostfile="hosts", launcher=LauncherKind(launcher)))

    return make


@pytest.mark.parametrize(
    ("text", "launcher", "remote"),
    [
        ("0 127.0.0.1 0\n1 localhost 0", "auto", False),
        ("0 127.0.0.1 0\n1 localhost 0", "local", False),
        ("0 127.0.0.1 0\n1 ::1 0", "ssh", True),
        ("0 node0 0\n1 10.0.0.1 0", "auto", True),
        ("0 node0 0", "ssh", True),
    ],
)
def test_which_hosts_are_started_over_ssh(
    site: Callable[[str, str], Site], text: str, launcher: str, remote: bool
) -> None:
    found = site(text, launcher)
    assert type(found) is (SshSite if remote else LocalSite)
    assert found.hosts == parse_machinefile(text, source="hosts")
    found.close()


@pytest.mark.parametrize(
    ("text", "launcher", "words"),
    [
        ("0 node0 0", "local", "--launcher=local starts processes on this machine only, and "
"client 0 is on node0"),
        ("0 node0 0\n1 127.0.0.1 "
"0", "auto", "hosts: client 1 is on 127.0.0.1, which the other "
"machines cannot reach"),
        ("0 localhost 0\n1 fd00::1 "
"0", "ssh", "hosts: client 0 is on localhost, which the other "
"machines cannot reach"),
    ],
)  # fmt: skip
def test_machines_that_cannot_work_together(
    site: Callable[[str, str], Site], text: str, launcher: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        site(text, launcher)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("host", "dialled", "names"),
    [
        ("127.0.0.1", "127.0.0.1", ("127.0.0.1",)),
        ("10.0.0.1", "10.0.0.1", ("10.0.0.1",)),
        ("node3.invalid", "192.0.2.7", ("node3.invalid", "192.0.2.7")),
        ("node3.invalid", "localhost", ("node3.invalid",)),
    ],
)
def test_what_a_host_may_be_called(host: str, dialled: str, names: tuple[str, ...]) -> None:
    known = addresses_of({host, dialled}, 30.0)
    assert ssh_site.names_of(Host(id=0, address=host, port=0), dialled, known) == names


class Answering:
    """A connection to a host that answers, or does not."""

    def __init__(self, there: bool) -> None:
        self._there = there

    def run(self, argv: Sequence[str], *, timeout_s: float) -> Finished:
        if not self._there:
            raise JobError("no answer")
        return Finished(status=0, stdout=b"", stderr=b"")

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("there", "missing"),
    [([True, True, True], []), ([True, False, True], [1]), ([False, False, False], [])],
)
def test_hosts_that_do_not_answer_are_left_out_while_others_work(
    site: Callable[[str, str], Site], there: list[bool], missing: list[int]
) -> None:
    ssh = site("0 node0 0\n1 node1 0\n2 node2 0", "ssh")
    assert isinstance(ssh, SshSite)
    before = ssh.hosts
    ssh._connections = {host.id: Answering(up) for host, up in zip(before, there, strict=True)}  # type: ignore[misc]
    left_out = ssh.drop_missing()
    assert [host.id for host in left_out] == missing
    assert ssh.hosts == tuple(host for host in before if host.id not in missing)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[LoopbackSshd]]:
    """Two that let the same user in; the first one's configuration knows both."""
    started = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        started.append(LoopbackSshd(tmp_path / name))
    first, second = started
    shutil.copy(first.folder / "authorized_keys", second.folder / "authorized_keys")
    first.known_hosts.write_text(first.known_hosts.read_text() + second.known_hosts.read_text())
    yield started
    for server in started:
        server.close()


@pytest.mark.needs("sshd")
def test_the_hosts_that_come_back_go_on_without_one_that_does_not(
    servers: list[LoopbackSshd], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[list[int]] = []

    def open_agents(
        places: Mapping[int, HostEnvironment], record: Mapping[str, object], job: str
    ) -> None:
        for place in places.values():
            assert place.connection.label
        opened.append(list(places))

    monkeypatch.setattr(remote_site, "open_agents", open_agents)
    settings = SshSettings(config=servers[0].config)
    clients = tuple(
        Host(id=number, address="127.0.0.1", port=0, ssh_port=server.port)
        for number, server in enumerate(servers)
    )
    site = SshSite(clients, settings)
    site._connections = dict(connect_all(clients, settings))
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created_s=0.0)
    record = JobRecord(
        job="j", launcher=launcher, hostfile=None, hosts=clients, output="/tmp", started_s=0.0
    )
    try:
        for server in servers:
            server.break_lines()
        until(
            lambda: not any(host.alive for host in site._connections.values()),
            "the lines still stand",
            10.0,
        )
        servers[1].close()
        with pytest.raises(JobInterrupted, match=f":{clients[1].ssh_port}"):
            site.launcher(record, lambda: ())
        assert [client.id for client in site.drop_missing()] == [1]
        site.launcher(record, lambda: ())
        assert opened == [[0]]
    finally:
        site.close()
