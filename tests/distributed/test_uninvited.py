"""A job's sockets, as seen by somebody else on the machine: where they are bound, and that none lets a stranger in."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support.ssh_hosts import NEEDS_HOSTS, SshHost, SshHosts, clean_environment
from tests.support.training import endless
from tests.support.trainings import machinefile, make_data, training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

Z85 = rb"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"
"""What a key looks like."""
SSHD_PORTS = (22, 2222)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path)
    return tmp_path


def listening(processes: Iterable[psutil.Process]) -> list[tuple[str, int]]:
    """Every TCP socket on which one of them listens."""
    found = [
        connection.laddr
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    return [(address.ip, address.port) for address in found]


def test_no_socket_of_a_running_job_lets_anybody_in(folder: Path) -> None:
    flags = (
        f"--solver={endless(folder)}",
        f"--hostfile={machinefile(folder, 2)}",
        "--encrypt=on",
        "--exchange=svb",
    )
    with training(folder, *flags) as job:
        job.wait_for("Iteration 1, loss")
        sockets = listening((psutil.Process(job.process.pid), *job.children().values()))
        assert len(sockets) == 4, "two shards, and two workers for each other's factors"
        assert {host for host, _ in sockets} == {"127.0.0.1"}
        for place in sockets:
            assert_shut(place)
        for process in (psutil.Process(job.process.pid), *job.children().values()):
            shown = "\0".join((*process.cmdline(), *process.environ().values())).encode()
            assert not re.search(rb"\b[0-9a-f]{64}\b", shown), "a token is to be seen"
            assert not re.search(rb'(secret|public)"?:', shown), "keys are to be seen"
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0
    for path in folder.rglob("*"):
        if path.suffix in (".log", ".json", ".txt"):
            assert not re.search(rb"secret.{1,8}" + Z85, path.read_bytes()), f"{path} holds keys"


def listening_on(host: SshHost) -> list[tuple[str, int]]:
    """Every TCP socket on which anything but sshd listens."""
    rows = [line.split()[3].rpartition(":") for line in host.run(["ss", "-ltnH"]).stdout.splitlines()]
    return [(address.strip("[]"), int(port)) for address, _, port in rows if int(port) not in SSHD_PORTS]


def assert_shut(place: tuple[str, int]) -> None:
    """Nobody can connect there, with or without ZeroMQ."""
    with pytest.raises(OSError, match=r"timed out|refused|No route to host"):
        socket.create_connection(place, timeout=0.3)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IPV6, 1)
        stranger.connect("tcp://[{}]:{}".format(*place) if ":" in place[0] else "tcp://{}:{}".format(*place))
        stranger.send(b"what do you have?")
        assert stranger.poll(200) == 0


@NEEDS_HOSTS
def test_no_socket_on_any_host_lets_anybody_in(tmp_path: Path) -> None:
    """Without a flag: a job on other hosts encrypts, and binds to their addresses in the machinefile."""
    with SshHosts(tmp_path, 3) as hosts:
        desk, working = hosts[2], hosts[:2]
        make_data(tmp_path)
        for host in working:
            for name in ("train_lmdb", "test_lmdb"):
                shutil.copytree(tmp_path / name, host.outside("/root") / name)
        endless(desk.outside("/root"))
        lines = [f"{index} {host.name} 0\n" for index, host in enumerate(working)]
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
                for host in working:
                    sockets = listening_on(host)
                    assert len(sockets) == 2, sockets  # the shard's, and the worker's for factors
                    assert {address for address, _ in sockets} <= {host.address, host.address6}
                    for place in sockets:
                        assert_shut(place)
                assert listening_on(desk) == []
                for process in desk.processes_of("uninvited"):
                    process.send_signal(signal.SIGINT)
                said += launcher.stderr
                assert launcher.wait(60) == 0, "".join(said)
            finally:
                for process in desk.processes_of("uninvited"):
                    process.kill()
