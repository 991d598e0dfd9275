"""A job's sockets, as seen by somebody else on the machine: where they are bound, and that none lets a stranger in."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support.training import write_definitions
from tests.support.trainings import Training, machinefile, make_data, training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

Z85 = rb"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"
"""What a key looks like."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path)
    return tmp_path


def listening(job: Training) -> list[tuple[str, int]]:
    """Every TCP socket on which a process of the job listens."""
    found = [
        connection.laddr
        for process in (psutil.Process(job.process.pid), *job.children().values())
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    return [(address.ip, address.port) for address in found]


def test_no_socket_of_a_running_job_lets_anybody_in(folder: Path) -> None:
    solver = write_definitions(folder, batch=5, extra="max_iter: 1000000\ndisplay: 1")
    solver.write_text(
        re.sub(r"test_(iter|interval): \d+", "", solver.read_text(encoding="utf-8")), encoding="utf-8"
    )
    flags = (f"--solver={solver}", f"--hostfile={machinefile(folder, 2)}", "--encrypt=on", "--exchange=svb")
    with training(folder, *flags) as job:
        job.wait_for("Iteration 1, loss")
        sockets = listening(job)
        assert len(sockets) == 4, "two shards, and two workers for each other's factors"
        assert {host for host, _ in sockets} == {"127.0.0.1"}
        for place in sockets:
            with pytest.raises(OSError, match=r"timed out|refused"):
                socket.create_connection(place, timeout=0.3)
            assert _says_nothing(*place)
        for process in (psutil.Process(job.process.pid), *job.children().values()):
            shown = "\0".join((*process.cmdline(), *process.environ().values())).encode()
            assert not re.search(rb"\b[0-9a-f]{64}\b", shown), "a token is to be seen"
            assert not re.search(rb'(secret|public)"?:', shown), "keys are to be seen"
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0
    for path in folder.rglob("*"):
        if path.suffix in (".log", ".json", ".txt"):
            assert not re.search(rb"secret.{1,8}" + Z85, path.read_bytes()), f"{path} holds keys"


def _says_nothing(host: str, port: int) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{host}:{port}")
        stranger.send(b"what do you have?")
        return stranger.poll(200) == 0
