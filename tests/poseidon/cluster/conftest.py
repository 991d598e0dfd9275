"""A real sshd on this machine, and a connection to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from poseidon.cluster.machinefile import Host
from poseidon.cluster.ssh.config import SshSettings
from poseidon.cluster.ssh.connections import SshConnection, connect
from tests.support.loopback_sshd import LoopbackSshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSshd]:
    server = LoopbackSshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


@pytest.fixture
def host(sshd: LoopbackSshd) -> Iterator[SshConnection]:
    connected = connect(Host(id=0, address="127.0.0.1", port=0), SshSettings(config=sshd.config))
    yield connected
    connected.close()
