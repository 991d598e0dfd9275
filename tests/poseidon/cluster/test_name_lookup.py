"""Names within a time limit: a resolver that does not answer holds nobody up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from poseidon.cluster.machinefile import Host
from poseidon.cluster.name_lookup import NameTimeoutError, addresses_of, dial, look_up
from poseidon.cluster.rendezvous.address import address_of
from poseidon.cluster.ssh.config import SshSettings
from poseidon.cluster.ssh.connections import connect_all
from poseidon.errors import JobError
from tests.support.loopback_sshd import LoopbackSshd

_getaddrinfo = socket.getaddrinfo


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A resolver that does not answer for names that begin with `hanging`, until the test is over."""
    over = threading.Event()

    def ask(host: str, *rest: object, **more: object) -> object:
        if host.startswith("hanging"):
            over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return _getaddrinfo(host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    yield
    over.set()


@pytest.mark.usefixtures("hanging")
def test_a_resolver_that_hangs_is_left_behind() -> None:
    with pytest.raises(NameTimeoutError):
        look_up("hanging", 22, 0.05)
    assert addresses_of(["hanging", "127.0.0.1", "hanging2", "no.such.host.invalid"], 0.5) == {
        "127.0.0.1": ("127.0.0.1",)
    }
    with pytest.raises(JobError, match="MASTER_ADDR=hanging, is not known: the name server does not answer"):
        address_of("hanging", 0.0)


@pytest.mark.needs("sshd")
@pytest.mark.usefixtures("hanging")
def test_a_host_whose_name_is_not_answered_is_one_problem_among_others(sshd: LoopbackSshd) -> None:
    clients = [
        Host(id=0, address="hanging", port=0),
        Host(id=1, address="127.0.0.1", port=0, user="nobody-of-that-name"),
    ]
    with pytest.raises(JobError) as caught:
        connect_all(clients, SshSettings(config=sshd.config, connect_timeout_s=1.0))
    first, *problems = str(caught.value).split("\n")
    assert first == "2 problems on the 2 hosts:"
    assert "what the name hanging means was not learnt within 1 s" in problems[0]
    assert "nobody-of-that-name@127.0.0.1" in problems[1]


def test_what_is_no_name() -> None:
    with pytest.raises(OSError, match="it cannot be a name"):
        look_up("a..b", 22, 10.0)


def test_the_second_address_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as gone:
        there, nowhere = server.getsockname(), gone.getsockname()
        gone.close()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in (nowhere, there)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with dial("node", 1, 10.0) as line:
            assert line.getpeername() == there
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
        with pytest.raises(ConnectionRefusedError):
            dial("node", 1, 10.0)
