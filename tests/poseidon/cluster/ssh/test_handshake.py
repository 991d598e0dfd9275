"""What is said of hosts that are not reached; no sshd is needed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest

from poseidon.cluster.machinefile import SshSettings, is_loopback, read_machinefile
from poseidon.cluster.ssh import handshake
from poseidon.cluster.ssh.config import Endpoint
from poseidon.errors import JobError


def test_the_hosts_of_the_samples_are_known(repository: Path) -> None:
    files = [path for path in (repository / "machinefiles").iterdir() if path.name != "README.md"]
    hosts = {host.address for path in files for host in read_machinefile(path)}
    assert {host for host in hosts if not is_loopback(host)} == handshake.EXAMPLES


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known",
        ),
        (TimeoutError(), "no answer within 15 s"),
        (OSError(113, "No route to host"), "cannot be reached: No route to host"),
    ],
)
def test_a_host_of_a_sample_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, failure: OSError, says: str
) -> None:
    def fail(*_: object) -> NoReturn:
        raise failure

    monkeypatch.setattr(handshake, "dial", fail)
    for name, hint in (
        ("10.0.0.7", "; is it a host of a sample machinefile? Put your own in its place"),
        ("ml7", ""),
    ):
        endpoint = Endpoint(
            name=name,
            host=name,
            port=22,
            user="ml",
            identities=(),
            with_agent=False,
            alias=name,
            known_hosts=(),
        )
        with pytest.raises(JobError) as caught:
            handshake.handshake(endpoint, None, SshSettings(connect_timeout_s=15.0))
        assert str(caught.value).endswith(f"{says}{hint}")
