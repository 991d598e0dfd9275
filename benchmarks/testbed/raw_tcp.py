"""Bytes over TCP between two hosts, with nothing else: what an exchange could reach at most.

python raw_tcp.py receive ADDRESS        prints its port, then the MB/s that have come
python raw_tcp.py send ADDRESS PORT      sends for `SECONDS`
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout works uninstalled

from benchmarks.testbed.hosts import Host

SECONDS = 3.0
PIECE = bytearray(2**20)


def mb_s(hosts: Sequence[Host], connections: int) -> float:
    """Return the MB/s that a host gets from the other one, both ways at once.

    Args:
        hosts: two.
        connections: each way, with a process for each end.
    """
    receivers, senders = [], []
    for host, other in (hosts, reversed(hosts)):
        for _ in range(connections):
            receiver = _start(host, "receive", host.address)
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            receivers.append(receiver)
            senders.append((other, host.address, port))
    sending = [_start(host, "send", address, port) for host, address, port in senders]
    total = sum(float(receiver.communicate()[0]) for receiver in receivers)
    for sender in sending:
        sender.communicate()
    return total / len(hosts)


def _start(host: Host, *arguments: str) -> subprocess.Popen[str]:
    command = [*host.enter, sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def receive(address: str) -> None:
    """Take one connection until it ends; print its MB/s."""
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        stream, _ = listener.accept()
        began_s, count = time.perf_counter(), 0
        while got := stream.recv_into(PIECE):
            count += got
        print(count / 1e6 / (time.perf_counter() - began_s), flush=True)


def send(address: str, port: int) -> None:
    """Send for `SECONDS`."""
    with socket.create_connection((address, port)) as stream:
        ends_s = time.perf_counter() + SECONDS
        while time.perf_counter() < ends_s:
            stream.sendall(PIECE)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]))
