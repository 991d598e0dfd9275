"""Sites: the hosts of a job, and what starts its processes there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.cluster.machinefile import Host, HostRole
from poseidon.errors import JobError
from poseidon.launch.extraction_job import require_local
from poseidon.launch.site import AgentSiteLauncher, LocalSite, SiteLauncher, read_hosts

TWO = (Host(id=0, address="127.0.0.1", port=0), Host(id=1, address="::1", port=0))


def test_hosts(tmp_path: Path) -> None:
    assert read_hosts(None, 1) == (Host(id=0, address="127.0.0.1", port=0),)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("0 127.0.0.1 9999\n1 localhost 0\n", encoding="utf-8")
    assert [host.port for host in read_hosts(str(hostfile), 1)] == [9999, 0]
    hostfile.write_text("0 10.0.0.7 9999\n", encoding="utf-8")
    with pytest.raises(
        JobError, match=r"client 0 is on 10\.0\.0\.7; this command works on this machine only"
    ):
        require_local(str(hostfile), read_hosts(str(hostfile), 1))


def launcher_of(site: LocalSite) -> SiteLauncher:
    return site.launcher(None, lambda: ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cpus", "working", "cores"), [(8, 2, 4), (7, 2, 3), (1, 2, 1), (None, 1, 1)]
)
def test_the_hosts_of_one_machine_share_its_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int | None, working: int, cores: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    serving = Host(id=2, address="127.0.0.1", port=0, role=HostRole.SERVER)
    assert launcher_of(LocalSite((*TWO[:working], serving))).cores(TWO[0]) == cores


def test_sockets_of_a_local_host_are_in_a_folder_of_this_user(tmp_path: Path) -> None:
    launcher = launcher_of(LocalSite(TWO))
    folders = [launcher.socket_folder(host) for host in (*TWO, *TWO)]
    assert folders[:2] == folders[2:]
    assert len(set(folders)) == 2
    assert {os.stat(folder).st_mode & 0o777 for folder in folders} == {0o700}
    os.rmdir(folders[0])  # as the workers do once they are connected
    launcher.close()
    launcher.close()
    assert not any(map(os.path.exists, folders))


def test_a_local_site_uses_the_files_where_they_are(tmp_path: Path) -> None:
    site = LocalSite(TWO)
    assert site.opens_files_here
    assert site.path(tmp_path) == str(tmp_path)
    assert launcher_of(site).path(TWO[0], tmp_path) == str(tmp_path)
    assert site.drop_missing() == ()
    assert site.resume_command("poseidon train", {"snapshot": "a.solverstate"}) == "poseidon train"


class Agents:
    """Stands for an `AgentLauncher`."""

    def scratch(self, host: Host) -> str:
        return f"/tmp/scratch{host.id}"


def test_a_remote_host_has_a_file_where_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = AgentSiteLauncher(Agents())  # type: ignore[arg-type]
    launcher.sent = {1: {tmp_path / "model": "/tmp/scratch1/model"}}
    assert launcher.path(TWO[1], tmp_path / "model") == "/tmp/scratch1/model"
    assert launcher.path(TWO[0], tmp_path / "model") == "model"
    assert launcher.socket_folder(TWO[1]) == "/tmp/scratch1/client_1"
