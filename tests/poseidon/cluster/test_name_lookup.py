"""Names within a time limit: a resolver that does not answer holds nobody up."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from poseidon.cluster import name_lookup
from poseidon.cluster.dial.ssh import dial_all
from poseidon.cluster.machinefile import Host, SshSettings
from poseidon.cluster.name_lookup import (
    NameTimeoutError,
    address_for_all,
    address_of,
    addresses_of,
    dial,
    look_up,
    own_address_towards,
)
from poseidon.cluster.python_command import LauncherEnvironment
from poseidon.errors import JobError
from tests.support.loopback_sshd import LoopbackSshd

OWN = LauncherEnvironment(python=sys.executable, checkout="", folder="/")
_getaddrinfo = socket.getaddrinfo


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A resolver that does not answer for names that begin with `hanging`, until the test is
    over.
    """
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
    with pytest.raises(JobError, match="MASTER_ADDR=hanging, is not known"):
        address_of("hanging", 0.0)


@pytest.mark.needs("sshd")
@pytest.mark.usefixtures("hanging")
def test_a_host_whose_name_is_not_answered_is_one_problem_among_others(sshd: LoopbackSshd) -> None:
    clients = [
        Host(id=0, address="hanging", port=0),
        Host(id=1, address="127.0.0.1", port=0, user="nobody-of-that-name"),
    ]
    settings = SshSettings(config=sshd.config, connect_timeout_s=1.0)
    with pytest.raises(JobError) as caught:
        dial_all(clients, settings, OWN)
    first, *problems = str(caught.value).split("\n")
    assert first == "2 problems on the 2 hosts:"
    assert "the name hanging was not resolved within 1 s" in problems[0]
    assert "nobody-of-that-name@127.0.0.1" in problems[1]


def test_what_is_no_name() -> None:
    with pytest.raises(OSError, match="it cannot be a name"):
        look_up("a..b", 22, 10.0)


def test_the_second_address_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        there, nowhere = server.getsockname(), gone.getsockname()
        gone.close()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in (nowhere, there)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with dial("node", 1, 10.0) as line:
            assert line.getpeername() == there
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
        with pytest.raises(ConnectionRefusedError):
            dial("node", 1, 10.0)


def test_names_and_addresses() -> None:
    assert address_of("localhost", 0.0) in ("127.0.0.1", "::1")
    assert address_of("10.1.2.3", 0.0) == "10.1.2.3"
    assert own_address_towards("127.0.0.1") == "127.0.0.1"


def test_a_name_is_asked_for_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [socket.gaierror(-2, "Name or service not known")] * 2
    answers.append([(2, 1, 6, "", ("10.0.0.9", 0))])

    def ask(*_: object, **__: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(name_lookup, "PAUSE_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    assert address_of("poseidon-0.poseidon", 60.0) == "10.0.0.9"
    answers.append(socket.gaierror(-2, "Name or service not known"))
    with pytest.raises(JobError, match="MASTER_ADDR=nowhere, is not known"):
        address_of("nowhere", 0.0)


def test_a_host_whose_own_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "own_address_towards", lambda _: "10.0.0.7")
    assert address_for_all("node0", "127.0.1.1") == "10.0.0.7"
    assert address_for_all("node0", "10.0.0.5") == "10.0.0.5"
    assert address_for_all("localhost", "127.0.0.1") == "127.0.0.1"
    assert address_for_all("127.0.0.1", "127.0.0.1") == "127.0.0.1"

    def no_route(address: str) -> str:
        raise JobError("there is no route")

    monkeypatch.setattr(name_lookup, "own_address_towards", no_route)
    assert address_for_all("node0", "127.0.1.1") == "127.0.1.1"


def test_any_exception_of_the_resolver_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        look_up("node1", 0, 600.0)  # the time limit of a test ends such a wait
