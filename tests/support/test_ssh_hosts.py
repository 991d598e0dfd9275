"""The hosts that other tests stand on: apart from each other, reachable, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed import links
from benchmarks.testbed.names import owner
from tests.support.live_processes import none_left
from tests.support.ssh_hosts import OTHER_PORT, ROOT, SshHosts, clean_environment

pytestmark = pytest.mark.needs("hosts")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("ssh"), 2) as hosts:
        yield hosts


def ssh(hosts: SshHosts, *words: str) -> subprocess.CompletedProcess[str]:
    # ssh itself asks the password file for the home folder, not $HOME.
    home = hosts.home / ".ssh"
    options = [
        "-o",
        "BatchMode=yes",
        "-o",
        f"UserKnownHostsFile={home}/known_hosts",
        "-i",
        f"{home}/id_ed25519",
    ]
    return subprocess.run(
        ["ssh", "-F", "none", *options, *words],
        env=hosts.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_test_reaches_each_host_by_address_and_other_port(hosts: SshHosts) -> None:
    first, second = hosts
    assert ssh(hosts, first.address, "hostname").stdout == "host0\n"
    assert ssh(hosts, "-p", str(OTHER_PORT), second.address, "hostname").stdout == "host1\n"


def test_hosts_reach_each_other_by_name_and_ipv6(hosts: SshHosts) -> None:
    assert hosts[0].run(["ssh", "-oBatchMode=yes", "host1", "hostname"]).stdout == "host1\n"
    assert (
        hosts[1].run(["ssh", "-oBatchMode=yes", hosts[0].address6, "hostname"]).stdout == "host0\n"
    )


@pytest.mark.parametrize("place", ["/root", "/tmp"])
def test_files_are_each_hosts_own(hosts: SshHosts, place: str) -> None:
    hosts[0].run(["sh", "-c", f"echo mine > {place}/note"])
    assert hosts[0].outside(f"{place}/note").read_text() == "mine\n"
    assert hosts[1].run(["cat", f"{place}/note"], check=False).returncode != 0


def test_the_tests_folder_cannot_be_seen(hosts: SshHosts, tmp_path: Path) -> None:
    assert hosts[0].run(["ls", str(tmp_path)], check=False).returncode != 0
    assert hosts[0].run(["ls", str(hosts.home)], check=False).returncode != 0


def test_hosts_have_the_checkout_and_its_python(hosts: SshHosts) -> None:
    hosts[0].run([sys.executable, "-c", "import psutil"])
    hosts[0].run(["ls", str(ROOT / "poseidon")])


def test_a_host_sees_and_counts_its_own_processes_alone(hosts: SshHosts) -> None:
    # Python names itself when it already runs; a shell would say so before it turns into what it
    # starts.
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    words = hosts[0].command([sys.executable, "-c", program])
    with subprocess.Popen(
        words, env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            inside = child.stdout.readline().strip()
            assert [process.cmdline()[1:] for process in hosts[0].processes()] == [["-c", program]]
            assert hosts[1].processes() == []
            assert (
                program not in hosts[1].run(["cat", f"/proc/{inside}/cmdline"], check=False).stdout
            )
        finally:
            hosts[0].run(["kill", inside])
            child.wait(30)


def test_a_crash_ends_all_and_a_boot_brings_it_back(hosts: SshHosts) -> None:
    host = hosts[1]
    words = host.command(["sh", "-c", "echo there; exec sleep 1000"])
    with subprocess.Popen(
        words, env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        host.crash()
        assert child.wait(30) != 0
    assert ssh(hosts, host.address, "true").returncode == 255
    host.start()
    host.wait_until_up()
    assert ssh(hosts, host.address, "hostname").stdout == "host1\n"


def test_a_cut_cable_loses_what_is_sent(hosts: SshHosts) -> None:
    look = [
        sys.executable,
        "-c",
        f"import socket; socket.create_connection(('{hosts[1].address}', 22), 0.3)",
    ]
    assert hosts[0].run(look).returncode == 0
    hosts[1].cut()
    assert hosts[0].run(look, check=False).returncode != 0
    hosts[1].mend()
    assert hosts[0].run(look).returncode == 0


def test_nothing_is_left(tmp_path: Path) -> None:
    with SshHosts(tmp_path, 1) as hosts:
        (host,) = hosts
        words = host.command(["sh", "-c", "echo there; exec sleep 1000"])
        with subprocess.Popen(
            words, env=clean_environment(), stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == "there\n"
            (sleeper,) = host.processes()
            (sleeper_pid, first_pid) = (sleeper.pid, host.first_pid)
            host.close()
            child.wait(30)
        name = host.network
    assert none_left([sleeper_pid, first_pid])
    assert name not in [*links.host_names(), *links.link_names()]
    assert owner(name) == os.getpid()
