"""A job's processes run on the hosts that their clients' addresses name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping

import pytest

from benchmarks.testbed.host_launcher import HostLauncher
from benchmarks.testbed.hosts import Host, Hosts
from poseidon.cluster import machinefile
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import JobError

PROGRAM = """
import socket
with socket.socket() as server:
    server.bind((input(), 0))
    print(server.getsockname()[0], flush=True)
"""


class RecordingListener:
    """Keeps what a process says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.status: int | None = None
        self.ended = threading.Event()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        raise AssertionError(event)

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self.lines += text.splitlines()

    def exited(self, name: ProcessName, status: int) -> None:
        self.status = status
        self.ended.set()


def spec(host: str, first_line: str) -> ProcessSpec:
    name = ProcessName(role=Role.WORKER, index=0, client=0, host=host)
    return ProcessSpec(
        name=name, argv=(sys.executable, "-c", PROGRAM), first_line=first_line.encode()
    )


@pytest.mark.needs("networks")
@pytest.mark.processes
def test_a_process_has_the_address_of_its_host() -> None:
    """Only there can it be bound to."""
    with Hosts(2) as hosts:
        address = hosts[1].address
        for host, good in ((hosts[1], True), (hosts[0], False)):
            listener = RecordingListener()
            client = machinefile.Host(id=0, address=host.address, port=0)
            process = HostLauncher(hosts).start(spec(host.address, address), client, listener)
            try:
                assert listener.ended.wait(30)
            finally:
                process.close()
            assert (listener.status == 0) is good
            assert (address in listener.lines) is good


def test_a_client_elsewhere_is_refused() -> None:
    launcher = HostLauncher([Host(index=0, name="h0", address="10.0.0.1")])
    with pytest.raises(
        JobError, match=r"client 0 is on 10\.0\.0\.9, which is none of the hosts: 10\.0\.0\.1"
    ):
        launcher.start(
            spec("10.0.0.9", ""),
            machinefile.Host(id=0, address="10.0.0.9", port=0),
            RecordingListener(),
        )
