"""True hosts: they reach each other, are counted, and are gone afterwards whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import links
from benchmarks.testbed.hosts import Hosts, remove_leftovers
from benchmarks.testbed.names import GroupName, owner

ROOT = Path(__file__).parents[3]
SEND = """
import socket, sys
server = socket.create_server(("", 0)) if sys.argv[1] == "listen" else None
if server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    while peer.recv(1 << 16):
        pass
else:
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
        peer.sendall(bytes(int(sys.argv[3])))
"""
HOLD = """
import os, signal, sys
sys.path.insert(0, {root!r})
from benchmarks.testbed.hosts import Hosts
with Hosts(1):
    print("made", flush=True)
    {then}
"""


def names_of(pid: int) -> list[str]:
    return [name for name in [*links.host_names(), *links.link_names()] if owner(name) == pid]


def hold(then: str) -> subprocess.Popen[str]:
    program = HOLD.format(root=str(ROOT), then=then)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.needs("networks")
def test_bytes_between_hosts_are_counted_on_both_links() -> None:
    size = 3_000_000
    with Hosts(3, rate_mbit=1000) as hosts:
        first, second, third = hosts
        command = [sys.executable, "-c", SEND]
        with subprocess.Popen(
            [*first.enter, *command, "listen"], stdout=subprocess.PIPE, text=True
        ) as listener:
            assert listener.stdout is not None
            port = listener.stdout.readline().strip()
            before = hosts.traffic()
            subprocess.run(
                [*second.enter, *command, first.address, port, str(size)], check=True, timeout=30
            )
            listener.wait(30)
        after = hosts.quiet_traffic()
        moved = [new.since(old) for new, old in zip(after, before, strict=True)]
        assert moved[1].sent_bytes == pytest.approx(size, rel=0.02)
        assert moved[0].received_bytes == pytest.approx(size, rel=0.02)
        assert moved[2].sent_bytes < size / 100
        assert third.address not in (first.address, second.address)


@pytest.mark.needs("networks")
def test_hosts_go_with_an_exception_and_take_their_processes_along() -> None:
    with pytest.raises(RuntimeError), Hosts(2) as hosts:
        words = [*hosts[0].enter, "sh", "-c", "echo there; exec sleep 1000"]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        raise RuntimeError
    with child:
        assert child.wait(30) == -signal.SIGKILL
    assert names_of(os.getpid()) == []


@pytest.mark.needs("networks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hosts_go_with_a_signal(number: signal.Signals) -> None:
    with hold("signal.pause()") as child:
        assert child.stdout is not None and child.stdout.readline() == "made\n"
        assert names_of(child.pid) != []
        child.send_signal(number)
        assert child.wait(30) == 128 + number
    assert names_of(child.pid) == []


@pytest.mark.needs("networks")
def test_what_a_killed_process_left_is_removed() -> None:
    with hold("os.kill(os.getpid(), signal.SIGKILL)") as child:
        child.wait(30)
    name = GroupName(pid=child.pid, number=0)
    assert name.host(0) in names_of(child.pid)
    with Hosts(1):  # of a living process: these stay
        removed = remove_leftovers()
        assert {name.host(0), name.bridge} <= set(removed)
        assert names_of(os.getpid()) != []
    assert names_of(child.pid) == []
