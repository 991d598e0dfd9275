"""A job's sockets, as unauthenticated peers see them: their addresses, and that each refuses
such a peer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from poseidon.cluster.rendezvous import write_new_key
from tests.support.polling import until
from tests.support.ssh_hosts import SshHost, SshHosts, clean_environment
from tests.support.training import Job, endless, largest_difference, run, weights, write_definitions
from tests.support.training_processes import WAIT_S, Training, make_data, training
from tests.support.unauthenticated import another_user, count_refusals

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

KEY = rb"[0-9a-f]{64}"
"""The pattern of a key."""
SSHD_PORTS = (22, 2222)
ACCEPTS = "00010000"
"""The flags in /proc/net/unix of a socket that listens."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path)
    return tmp_path


def listening(processes: Iterable[psutil.Process]) -> list[tuple[str, int]]:
    """Return the addresses of all TCP sockets on which the processes listen."""
    found = [
        connection.laddr
        for process in processes
        for connection in connections_of(process, "inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    return [(address.ip, address.port) for address in found]


def connections_of(process: psutil.Process, kind: str) -> list[Any]:
    """Return the sockets of a process; none once it has ended, as a short-lived child may have."""
    try:
        return list(process.net_connections(kind=kind))
    except psutil.NoSuchProcess:
        return []


def assert_files_without_keys(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.suffix in (".log", ".json", ".txt"):
            assert not re.search(rb"secret.{1,8}" + KEY, path.read_bytes()), f"{path} holds keys"


def assert_nothing_secret_shows(processes: Iterable[psutil.Process]) -> None:
    """Check that no secret is in their arguments or environment."""
    for process in processes:
        shown = "\0".join((*process.cmdline(), *process.environ().values())).encode()
        assert not re.search(rb"\b[0-9a-f]{64}\b", shown), "a token is to be seen"
        assert not re.search(rb'(secret|public)"?:', shown), "keys are to be seen"


def of(jobs: Iterable[Training]) -> list[psutil.Process]:
    """Return all processes of these jobs, with their launchers."""
    own = [psutil.Process(job.process.pid) for job in jobs]
    return own + [child for process in own for child in process.children(recursive=True)]


def meeting_places(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the paths of all sockets on which the processes listen."""
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()]
    accepting = {row[-1] for row in rows if len(row) == 8 and row[3] == ACCEPTS}
    named = (c.laddr for process in processes for c in connections_of(process, "unix"))
    return {Path(path) for path in named if path in accepting}


WAITS = """
import pathlib, sys, time
while sys.argv[-2:] in (["--rank", "1"], ["--rank", "3"]) and not pathlib.Path("go").exists():
    time.sleep(0.01)
"""
"""A module of the user's: it holds two workers back before they connect."""


@pytest.mark.thorough
def test_every_socket_refuses_unauthenticated_peers_while_workers_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of two workers, started by a scheduler.

    First one task is late, then a worker of each host: the sockets of the shards and of the hosts are
    open, and only keys and folders protect them. The weights equal the weights of one undisturbed process.
    """
    run(write_definitions(folder, batch=12, extra="max_iter: 6"), Job())
    undisturbed = weights(folder, 6)
    (folder / "snap_iter_6.caffemodel").unlink()
    write_definitions(folder, batch=3, extra="max_iter: 6")
    write_new_key(folder / "key")
    job = ("train", "--solver=solver.prototxt", "--exchange=svb", "--encrypt=on", "--workers=2")
    (folder / "waits.py").write_text(WAITS, encoding="ascii")
    words = (f"--key_file={folder / 'key'}", *job, "--import=waits", "--output=out")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = probe.getsockname()
    for name, value in (("SIZE", "2"), ("LOCAL_RANK", "0"), ("RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", meeting[0])
    monkeypatch.setenv("MASTER_PORT", str(meeting[1]))
    with training(folder, *words, command="worker") as first:
        until(lambda: listening(of([first])) == [meeting], "rank 0 did not listen", WAIT_S)
        count_refusals(*meeting)
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
        with training(folder, *words, command="worker") as second:
            jobs = (first, second)
            until(lambda: len(listening(of(jobs))) == 3, "two shards did not listen", WAIT_S)
            until(
                lambda: len(meeting_places(of(jobs))) == 2,
                "the machines' first workers do not listen",
                WAIT_S,
            )
            assert_shut(meeting)
            sockets = set(listening(of(jobs))) - {meeting}
            assert {host for host, _ in sockets} == {"127.0.0.1"}
            with ThreadPoolExecutor() as pool:  # each waits for the limit of a handshake
                refusals = [*pool.map(lambda place: count_refusals(*place), sockets)]
            for place in meeting_places(of(jobs)):
                assert_private(place)
            (folder / "go").touch()
            assert [second.end(), first.end()] == [0, 0], "".join(first.lines)
    assert largest_difference(weights(folder, 6), undisturbed) <= 1e-5
    shards = json.loads((folder / "out" / "statistics.json").read_text())["shards"]
    assert len(shards) == 2
    for shard in shards.values():
        assert shard["refused"] >= refusals[0]
        assert shard["dropped"] == 0
    assert_files_without_keys(folder)


def assert_private(place: Path) -> None:
    """Check that another user of this host cannot connect to a Unix socket."""
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    if os.getuid() != 0:
        return
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with stranger, another_user(), pytest.raises(PermissionError):
        stranger.connect(str(place))


def listening_on(host: SshHost) -> list[tuple[str, int]]:
    """Return the addresses of all TCP sockets on which anything but sshd listens."""
    rows = [
        line.split()[3].rpartition(":") for line in host.run(["ss", "-ltnH"]).stdout.splitlines()
    ]
    return [
        (address.strip("[]"), int(port)) for address, _, port in rows if int(port) not in SSHD_PORTS
    ]


def peer_reaches(peer: SshHost, address: str, ports: Iterable[int]) -> bool:
    """Return True if a host can connect to each of these ports."""
    places = [(address, port) for port in ports]
    program = f"import socket; [socket.create_connection(place, 5.0) for place in {places}]"
    return peer.run([sys.executable, "-c", program], check=False).returncode == 0


def assert_shut(place: tuple[str, int]) -> None:
    """Check that a port accepts no connection, with or without ZeroMQ."""
    with pytest.raises(OSError, match=r"timed out|refused|No route to host"):
        socket.create_connection(place, timeout=0.3)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IPV6, 1)
        stranger.connect(
            "tcp://[{}]:{}".format(*place) if ":" in place[0] else "tcp://{}:{}".format(*place)
        )
        stranger.send(b"what do you have?")
        assert stranger.poll(200) == 0


@pytest.mark.needs("hosts")
def test_every_socket_on_every_host_refuses_unauthenticated_peers(tmp_path: Path) -> None:
    """Without a flag a job on other hosts is encrypted, and binds to their addresses in the
    machinefile: an IPv6 address and a name. Both hosts have another network, which the
    machinefile does not name.
    """
    with SshHosts(tmp_path, 3) as hosts:
        desk, working = hosts[2], hosts[:2]
        elsewhere = hosts.second_network(*working)
        make_data(tmp_path)
        for host in working:
            for name in ("train_lmdb", "test_lmdb"):
                shutil.copytree(tmp_path / name, host.outside("/root") / name)
        endless(desk.outside("/root"))
        lines = [f"0 {working[0].address6} 0\n", f"1 {working[1].name} 0\n"]
        desk.outside("/root/hosts").write_text("".join(lines))
        words = [
            "train",
            "--solver=solver.prototxt",
            "--hostfile=hosts",
            "--exchange=svb",
            "--threads=1",
            "--job",
            "uninvited",
        ]
        with subprocess.Popen(
            desk.command([sys.executable, "-m", "poseidon", *words]),
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        ) as launcher:
            assert launcher.stderr is not None
            said: list[str] = []
            try:
                for line in launcher.stderr:
                    said.append(line)
                    if "Iteration 3," in line:
                        break
                for host, peer in (working, working[::-1]):
                    sockets = listening_on(host)
                    assert len(sockets) == 2, sockets  # the shard's, and the worker's for factors
                    named = {host.address6} if host is working[0] else {host.address, host.address6}
                    assert {address for address, _ in sockets} <= named
                    for place in sockets:
                        assert_shut(place)
                    ports = [port for _, port in sockets]
                    assert peer_reaches(peer, elsewhere[host.name], SSHD_PORTS)
                    assert not any(
                        peer_reaches(peer, elsewhere[host.name], [port]) for port in ports
                    )
                assert listening_on(desk) == []
                of_the_job = [
                    process for host in hosts for process in host.processes_of("uninvited")
                ]
                # the launcher; an agent, a shard and a worker on each host
                assert len(of_the_job) >= 7
                assert_nothing_secret_shows(of_the_job)
                for process in desk.processes_of("uninvited"):
                    process.send_signal(signal.SIGINT)
                said += launcher.stderr
                assert launcher.wait(60) == 130, "".join(said)
            finally:
                for process in desk.processes_of("uninvited"):
                    process.kill()
