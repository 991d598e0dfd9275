"""Distributing parts: who gets what and where, to folders that stand for hosts and to real ones."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from poseidon.caffe.data.batches.numbered import part_path
from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.prepare.split import part_files, partition_data
from poseidon.caffe.data.staging import COPYING, Report, silent
from poseidon.caffe.launch.data_distribution import distribute, remote_path
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import dial_here
from poseidon.cluster.machinefile import Host, SshSettings, parse_machinefile
from poseidon.errors import JobError, UsageError
from tests.poseidon.caffe.data.prepare.test_split import make_rows
from tests.support.databases import make_pictures
from tests.support.ssh_hosts import SshHosts
from tests.support.training_processes import poseidon_here

LARGE_BYTES = 16_000_000


class Folders:
    """Takes the place of SSH: all agents are on this machine; a host is its `workdir`."""

    def __init__(self) -> None:
        self.agents: dict[int, RemoteAgent] = {}
        self.broken: set[int] = set()
        self.closed = 0
        self.settings = SshSettings()

    def dial_all(
        self, clients: Sequence[Host], settings: SshSettings, launcher: object
    ) -> Mapping[int, RemoteAgent]:
        self.settings = settings
        for client in clients:
            assert client.workdir is None, "it may not exist yet"
            self.agents[client.id] = agent = dial_here(client.address)
            if client.id in self.broken:
                agent.send_file = self.break_off  # type: ignore[method-assign]
        return dict(self.agents)

    def break_off(self, *file: object) -> None:
        raise JobError("the connection to it broke")

    def close_agents(self, agents: Iterable[RemoteAgent]) -> None:
        self.closed += 1
        for agent in agents:
            agent.close()


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Folders:
    found = Folders()
    monkeypatch.setattr("poseidon.caffe.launch.data_distribution.dial_all", found.dial_all)
    monkeypatch.setattr("poseidon.caffe.launch.data_distribution.close_agents", found.close_agents)
    monkeypatch.chdir(tmp_path)
    return found


def clients_in(folder: Path, count: int = 3) -> tuple[Host, ...]:
    """Host 0 is this machine, client 1 serves only, the others work in folders of their own."""
    lines = ["0 127.0.0.1 0", "1 serving 0 role=server"]
    lines += [
        f"{k} host{k} 0 python={sys.executable} workdir={folder}/there{k}" for k in range(2, count)
    ]
    return parse_machinefile("\n".join(lines), source="machines")


def test_each_working_client_gets_its_part_and_the_pictures_of_it(
    folders: Folders, tmp_path: Path
) -> None:
    (tmp_path / "pictures").mkdir()
    for name in "abcd":
        (tmp_path / "pictures" / f"{name}.jpg").write_text(name)
    (tmp_path / "list").write_text("".join(f"{name}.jpg 0\n" for name in "abcd"))
    partition_data(Path("list"), 3)
    said = distribute(
        Path("list"), clients_in(tmp_path, 4), root="pictures/", replace=False, report=silent
    )
    assert said == [
        "client 0 (127.0.0.1): this machine, where its part is",
        "client 2 (host2): 2 files, 2 of them sent, 0.0 MB",
        "client 3 (host3): 2 files, 2 of them sent, 0.0 MB",
    ]
    assert set(folders.agents) == {2, 3}
    there = sorted(
        str(path.relative_to(tmp_path / "there2")) for path in (tmp_path / "there2").rglob("*")
    )
    assert there == ["list_1", "pictures", "pictures/b.jpg"]
    assert (tmp_path / "there3" / "list_2").read_text() == "c.jpg 0\n"
    assert folders.closed == 1


@pytest.mark.parametrize("kind", ["lmdb", "leveldb", "rows"])
def test_a_second_call_sends_what_is_missing(folders: Folders, tmp_path: Path, kind: str) -> None:
    if kind == "rows":
        source = make_rows(tmp_path, [40, 7]).relative_to(tmp_path)
    else:
        source = make_pictures(tmp_path / "db", 30, backend=Backend.parse(kind)).relative_to(
            tmp_path
        )
    partition_data(source, 3)
    clients = clients_in(tmp_path, 4)
    folders.broken = {3}
    with pytest.raises(JobError, match=r"^client 3 \(host3\): copying broke off after \d+ bytes"):
        distribute(source, clients, root="", replace=False, report=silent)
    assert not (tmp_path / "there3" / part_path(source, 2) / "CURRENT").exists()
    folders.broken = set()
    told: list[tuple[str, int, int]] = []
    said = distribute(
        source, clients, root="", replace=False, report=lambda *words: told.append(words)
    )
    assert " 0 of them sent" in said[1] and " 0 of them sent" not in said[2]
    assert told[-1][0] == "copying" and told[-1][1] == told[-1][2]
    for number in (1, 2):
        mine, theirs = (
            part_path(source, number),
            tmp_path / f"there{number + 1}" / part_path(source, number),
        )
        if kind != "rows":
            backend = Backend.parse(kind)
            with (
                closing(open_cursor(mine, backend)) as here,
                closing(open_cursor(theirs, backend)) as there,
            ):
                assert [(k, bytes(v)) for k, v in records(here)] == [
                    (k, bytes(v)) for k, v in records(there)
                ]
        else:
            assert mine.read_bytes() == theirs.read_bytes()


def test_problems_of_all_hosts_are_listed(folders: Folders, tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "db", 3)
    partition_data(source, 3)
    for number in (2, 3):
        (tmp_path / f"there{number}").write_text("in the way")
    with pytest.raises(JobError) as caught:
        ssh = SshSettings(config=tmp_path / "config")
        distribute(
            Path("db"), clients_in(tmp_path, 4), root="", replace=False, report=silent, ssh=ssh
        )
    assert folders.settings == ssh
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 problems on the 2 hosts:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  client 2 (host2)",
        "  client 3 (host3)",
    ]


def test_an_interrupt_hangs_up(folders: Folders, tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "db", 3)
    partition_data(source, 3)

    def interrupt(activity: str, done: int, total: int) -> None:
        if activity == COPYING:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distribute(Path("db"), clients_in(tmp_path, 4), root="", replace=False, report=interrupt)
    assert folders.closed == 2, "at once, and at the end"


def test_a_part_of_one_file_is_counted_in_the_singular(folders: Folders, tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "db", 4, backend=Backend.LMDB).relative_to(tmp_path)
    partition_data(source, 2)
    first, again = (
        distribute(source, clients_in(tmp_path), root="", replace=False, report=silent)[1]
        for _ in range(2)
    )
    assert first.startswith("client 2 (host2): 1 file, 1 of them sent, ")
    assert again == "client 2 (host2): 1 file, 0 of them sent, 0.0 MB"


def test_where_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (plain, placed) = parse_machinefile("0 a 0\n1 b 0 workdir=~/work", source="machines")
    assert remote_path(Path("/data/db"), placed) == "/data/db"
    assert remote_path(Path("data/db"), placed) == "~/work/data/db"
    assert remote_path(Path("data/db"), plain) == f"{tmp_path}/data/db"
    with pytest.raises(UsageError, match=r"cannot be placed in the workdir of client 1 \(b\)"):
        remote_path(Path("../db"), placed)


def bring_lists(hosts: SshHosts, clients: Sequence[Host]) -> None:
    """Pictures and rows to real hosts; the second host dies while its picture comes, and is
    there again for a second call.
    """
    keys = hosts.home / ".ssh"
    config = Path("ssh_config")
    config.write_text(
        f"IdentityFile {keys}/id_ed25519\nUserKnownHostsFile {keys}/known_hosts\nUser root\n"
    )
    Path("pictures").mkdir()
    Path("pictures/a.jpg").write_bytes(b"small")
    Path("pictures/b.jpg").write_bytes(os.urandom(LARGE_BYTES))
    Path("list").write_text("a.jpg 0\nb.jpg 0\n")

    def bring(source: str, report: Report = silent) -> list[str]:
        settings = SshSettings(config=config)
        return distribute(
            Path(source), clients, root="pictures/", replace=False, report=report, ssh=settings
        )

    def die_before_the_end(activity: str, done: int, total: int) -> None:
        if activity == COPYING and done > total * 3 // 4 and not died:
            died.append(done)
            hosts[1].crash()

    died: list[int] = []
    partition_data(Path("list"), 2)
    with pytest.raises(JobError, match=r"^client 1 \(.*\): copying broke off after \d+ bytes"):
        bring("list", die_before_the_end)
    assert not hosts[1].outside("/root/data/pictures/b.jpg").exists()
    hosts[1].start()
    hosts[1].wait_until_up()
    first, second = bring("list")
    assert " 2 files, 0 of them sent" in first
    again = re.search(r" 2 files, 2 of them sent, ([\d.]+) MB", second)
    assert again is not None and float(again[1]) < LARGE_BYTES / 1e6 - 1
    rows = make_rows(Path(), [40, 7])
    partition_data(rows, 2)
    bring(str(rows))
    for number, host in enumerate(hosts):
        files = [
            file
            for source in (Path("list"), rows)
            for file in part_files(source, number, root="pictures/").files
        ]
        assert len(files) >= 4
        for path in files:
            assert host.outside(Path("/root/data") / path).read_bytes() == path.read_bytes()


@pytest.mark.needs("hosts")
@pytest.mark.processes
@pytest.mark.timeout(150)
def test_real_hosts_get_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    source = make_pictures(tmp_path / "db", 6)
    with SshHosts(tmp_path, 2) as hosts:
        monkeypatch.setenv("HOME", str(hosts.home))
        lines = [f"{k} {host.address} 0 workdir=~/data" for k, host in enumerate(hosts)]
        (tmp_path / "machines").write_text("\n".join(lines))
        for sent in (True, False):
            words = ("partition_data", "--hostfile=machines", "--distribute", "db")
            done = poseidon_here(tmp_path, *words)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("1 file, 1 of them sent") == (2 if sent else 0)
        for number, host in enumerate(hosts):
            there = host.outside(f"/root/data/db_{number}/data.mdb")
            assert there.read_bytes() == (tmp_path / f"db_{number}" / "data.mdb").read_bytes()
            assert sorted(path.name for path in host.outside("/root/data").iterdir()) == [
                f"db_{number}"
            ]
        bring_lists(hosts, parse_machinefile("\n".join(lines), source="machines"))
    assert source.exists()
