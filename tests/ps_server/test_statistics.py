"""How long connections had something to send: over a slow link as long as the bytes take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import links
from benchmarks.testbed.hosts import Hosts
from ps_server.statistics import sending_s

ROOT = Path(__file__).parents[2]
SINK = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    for expected in (1_000, 1_000_000):
        while expected:
            expected -= len(connection.recv(1 << 20))
        connection.sendall(b"all")
    connection.recv(1)
"""
SEND = """
import json, socket, sys, time
from ps_server.statistics import sending_s
with socket.create_connection((sys.argv[1], 7000)) as link:
    for size, quiet_s in ((1_000, 1.0), (1_000_000, 0.0)):
        link.sendall(bytes(size))
        link.recv(3)
        time.sleep(quiet_s)
        print(json.dumps(sending_s()))
"""


@pytest.mark.needs("networks")
def test_a_link_is_busy_as_long_as_its_bytes_take() -> None:
    with Hosts(2, subnet="10.214.99") as hosts:
        sender, receiver = hosts
        links.shape(sender.name, 10)
        with subprocess.Popen(
            [*receiver.enter, sys.executable, "-c", SINK], stdout=subprocess.PIPE, cwd=ROOT
        ) as sink:
            assert sink.stdout is not None
            assert sink.stdout.readline() == b"up\n"
            done = subprocess.run(
                [*sender.enter, sys.executable, "-c", SEND, receiver.address],
                capture_output=True,
                check=True,
                cwd=ROOT,
                timeout=60,
            )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(answer) for answer in answers] == [[receiver.address]] * 2
    quiet_s, busy_s = (answer[receiver.address] for answer in answers)
    assert quiet_s < 0.5  # of the second in which nothing was to be sent
    assert busy_s - quiet_s > 0.7 * 8e6 / 10e6


def test_loopback_is_left_out() -> None:
    assert not any(peer.startswith("127.") for peer in sending_s())
