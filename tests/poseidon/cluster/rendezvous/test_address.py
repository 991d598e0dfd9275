"""Which address stands for rank 0, and which is our own."""

from __future__ import annotations

import socket

import pytest

from poseidon.cluster.rendezvous import address as own_address
from poseidon.cluster.rendezvous.address import address_for_all, address_of, own_address_towards
from poseidon.errors import JobError


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

    monkeypatch.setattr(own_address, "PAUSE_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    assert address_of("poseidon-0.poseidon", 60.0) == "10.0.0.9"
    answers.append(socket.gaierror(-2, "Name or service not known"))
    with pytest.raises(JobError, match="MASTER_ADDR=nowhere, is not known: Name or service not known"):
        address_of("nowhere", 0.0)


def test_a_host_whose_own_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_address, "own_address_towards", lambda _: "10.0.0.7")
    assert address_for_all("node0", "127.0.1.1") == "10.0.0.7"
    assert address_for_all("node0", "10.0.0.5") == "10.0.0.5"
    assert address_for_all("localhost", "127.0.0.1") == "127.0.0.1"
    assert address_for_all("127.0.0.1", "127.0.0.1") == "127.0.0.1"

    def no_way(address: str) -> str:
        raise JobError("there is no way")

    monkeypatch.setattr(own_address, "own_address_towards", no_way)
    assert address_for_all("node0", "127.0.1.1") == "127.0.1.1"
