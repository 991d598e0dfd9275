"""How long connections had something to send: over a shaped link nearly always, over a fast one
hardly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import links
from benchmarks.testbed.hosts import Hosts
from ps_server.link_load import sending_s

ROOT = Path(__file__).parents[2]
SINK = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    expected = 1_000_000
    while expected:
        expected -= len(connection.recv(1 << 20))
    connection.sendall(b"all")
    connection.recv(1)
"""
SEND = """
import json, socket, sys, time
from ps_server.link_load import sending_s
with socket.create_connection((sys.argv[1], 7000)) as link:
    for _ in range(20):
        link.sendall(bytes(50_000))
        time.sleep(0.02)
    link.recv(3)
    print(json.dumps(sending_s()))
"""


@pytest.mark.needs("networks")
def test_a_link_that_is_the_limit_is_busy_as_long_as_its_bytes_take() -> None:
    with Hosts(2, subnet="10.214.99") as hosts:
        busy_s = []
        for rate in (None, 10):
            if rate is not None:
                links.shape(hosts[0].name, rate)
            busy_s.append(_busy_s(hosts[0].enter, hosts[1].enter, hosts[1].address))
    free_s, shaped_s = busy_s
    assert free_s < 0.5 * shaped_s
    assert shaped_s > 0.7 * 8e6 / 10e6


def test_loopback_is_left_out() -> None:
    assert not any(peer.startswith("127.") for peer in sending_s())


def _busy_s(sender: tuple[str, ...], receiver: tuple[str, ...], address: str) -> float:
    with subprocess.Popen(
        [*receiver, sys.executable, "-c", SINK], stdout=subprocess.PIPE, cwd=ROOT
    ) as sink:
        assert sink.stdout is not None
        assert sink.stdout.readline() == b"up\n"
        done = subprocess.run(
            [*sender, sys.executable, "-c", SEND, address],
            capture_output=True,
            check=True,
            cwd=ROOT,
            timeout=60,
        )
        sink.wait(30)
    answer = json.loads(done.stdout)
    assert list(answer) == [address]
    return float(answer[address])
