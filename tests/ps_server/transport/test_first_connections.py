"""The limit of first connections: who was not reached, and why."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from ps_server.client import Client
from ps_server.errors import PeerUnreachable
from ps_server.network import Network
from ps_server.protocol.settings import StoreSpec, TableSpec
from ps_server.transport import first_connections
from ps_server.transport.first_connections import ConnectLimit, FirstConnections
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport

LIMIT_S = 0.2
LIMIT = ConnectLimit(seconds=LIMIT_S, own="worker 1 on 10.0.0.2", peers=["shard 0", "shard 1"])


@pytest.fixture(autouse=True)
def _drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.transport.zmq_sockets.LINGER_MS", 0)


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address that is bound, and where nobody listens."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{place.getsockname()[1]}"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address whose kernel answers no attempt: its queue is full."""
    monkeypatch.setattr(first_connections, "PROBE_S", 0.1)
    with socket.socket() as place, socket.socket() as first, socket.socket() as second:
        place.bind(("127.0.0.1", 0))
        place.listen(0)
        first.connect(place.getsockname())
        second.setblocking(False)
        second.connect_ex(place.getsockname())
        yield f"tcp://127.0.0.1:{place.getsockname()[1]}"


@pytest.fixture(params=["refusing", "silent"])
def unreachable(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An address, and why it cannot be reached."""
    why = {"refusing": "Connection refused", "silent": "no answer"}[request.param]
    return request.getfixturevalue(request.param), why


def test_a_transport_names_who_cannot_be_reached(unreachable: tuple[str, str]) -> None:
    address, why = unreachable
    server = ZmqServerTransport("tcp://127.0.0.1:0")
    client = ZmqClientTransport([server.address, address], limit=LIMIT)
    sentence = (
        f"worker 1 on 10.0.0.2 could not connect to shard 1 at {address.removeprefix('tcp://')} "
        f"within 0.2 s: {why}; open the ports between the two hosts; "
        "`poseidon doctor --hostfile=FILE` tests each connection"
    )
    with pytest.raises(PeerUnreachable, match=re.escape(sentence)):
        client.receive(60)
    with pytest.raises(PeerUnreachable, match="shard 1"):
        client.lost  # noqa: B018
    client.close(drops=True)
    server.close()


def test_a_client_with_a_limit_raises_it_from_its_waits(unreachable: tuple[str, str]) -> None:
    address, why = unreachable
    store = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=4),))
    client = Client([address], Network(host="10.0.0.2", connect_s=LIMIT_S), store)
    try:
        with pytest.raises(PeerUnreachable, match=rf"worker 0 on 10.0.0.2 .* shard 0 at .*: {why}"):
            client.start(lambda _: [np.zeros(4, np.float32)])
    finally:
        client.close()


def test_who_was_reached_may_be_slow() -> None:
    """A process that is stopped does not shake hands; its kernel answers."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        client = ZmqClientTransport([f"tcp://127.0.0.1:{stopped.getsockname()[1]}"], limit=LIMIT)
        assert client.receive(5 * LIMIT_S) == []
        client.close(drops=True)


def waits_for(address: str, seconds: float = 10.0) -> FirstConnections:
    limit = ConnectLimit(seconds=seconds, own="worker 0", peers=["shard 0"])
    return FirstConnections([address], limit, now=0.0)


def test_time_in_which_this_process_did_not_run_does_not_count(refusing: str) -> None:
    waiting = waits_for(refusing)
    for look in range(1, 10):
        waiting.check((), now=100.0 * look)
    with pytest.raises(PeerUnreachable):
        waiting.check((), now=1000.0)


def test_who_can_be_reached_now_has_the_limit_again() -> None:
    """TCP's own next attempt may be a minute away."""
    with socket.create_server(("127.0.0.1", 0)) as late:
        waiting = waits_for(f"tcp://127.0.0.1:{late.getsockname()[1]}", 1.0)
        waiting.check((), now=1.0)
    waiting.check((), now=1.9)
    with pytest.raises(PeerUnreachable, match="Connection refused"):
        waiting.check((), now=2.0)


def test_a_connection_that_stood_has_no_limit(refusing: str) -> None:
    waiting = waits_for(refusing, 1.0)
    waiting.check({0}, now=0.5)
    waiting.check((), now=9.0)


def test_without_a_limit_it_waits_for_ever(refusing: str) -> None:
    FirstConnections([refusing], None, now=0.0).check((), now=1e9)
    assert Network().connect_limit(["shard 0"]) is None
