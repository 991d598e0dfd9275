"""ZeroMQ keeps the contract, and its errors are translated."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import zmq

from ps_server.errors import TransportError
from ps_server.keys import JobKeys
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport
from tests.support.transport_contract import Pair, check_transport, send_first

KEYS = JobKeys.new(workers=1, shards=1)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:0"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_contract(address: str, encrypted: bool) -> None:
    def pair() -> Pair:
        server = ZmqServerTransport(address, KEYS.of_shard(0) if encrypted else None)
        return server, ZmqClientTransport(
            [server.address], KEYS.of_worker(0) if encrypted else None
        )

    check_transport(pair)


@pytest.mark.parametrize("limit", [20, 100])  # at 100 the sockets fit, their monitors do not
def test_too_many_open_files(limit: int) -> None:
    program = (
        "import os, resource; from ps_server.transport.zmq_sockets import ZmqClientTransport, "
        "TransportError\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "try: ZmqClientTransport(['tcp://127.0.0.1:1'] * 60)\n"
        "except TransportError as error: print(error, flush=True)\n"
        "os._exit(0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == (
        f"cannot open the sockets of 60 connections: Too many open files; ulimit -n allows {limit}, "
        "set a higher limit\n"
    )


def test_more_connections_than_zeromq_has_sockets_for_by_itself() -> None:
    client = ZmqClientTransport(["tcp://127.0.0.1:1"] * 400)
    assert not client.lost
    client.close(drops=True)


def test_a_peer_that_does_not_receive_is_sent_little() -> None:
    """What is not taken stays with the sender, in both directions."""
    server = ZmqServerTransport("tcp://127.0.0.1:0")
    client = ZmqClientTransport([server.address])
    piece = bytes(4 * 2**20)
    most, tries = 20, 60  # queues of 2 + 4 messages, and the kernel's buffers
    try:
        assert client.send(0, [b"hello"])
        ((peer, _),) = server.receive(10)
        taken = 0
        for _ in range(tries):
            if client.send(0, [piece]):
                taken += 1
            else:
                client.receive(0.005)
        assert 0 < taken < most
        taken = 0
        for _ in range(tries):
            if server.send(peer, [piece]):
                taken += 1
            else:
                server._wait(0.005)
        assert 0 < taken < most
    finally:
        client.close()
        server.close()


def test_who_only_sends_goes_on_once_the_peer_has_received() -> None:
    server = ZmqServerTransport("tcp://127.0.0.1:0")
    client = ZmqClientTransport([server.address])
    piece = bytes(4 * 2**20)
    try:
        sent = received = 0
        while client.send(0, [piece]):
            sent += 1
        for _ in range(200):
            came = server.receive(0.01)
            for peer, _ in came:
                server.known(peer)
            received += len(came)
            sent += client.send(0, [piece])
        assert sent > 20
        while received < sent:
            received += len(server.receive(10))
    finally:
        client.close()
        server.close()


def test_what_nobody_takes_has_not_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel answers, and nobody behind it
        client = ZmqClientTransport([f"tcp://127.0.0.1:{mute.getsockname()[1]}"], tracked=True)
        client._sockets[0].setsockopt(zmq.LINGER, 0)
        try:
            assert client.unsent(0) == 0
            for count in (1, 2):
                assert client.send(0, [b"header", b""])
                assert client.unsent(0) == count
        finally:
            client.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_was_taken_has_left(encrypted: bool) -> None:
    server = ZmqServerTransport("tcp://127.0.0.1:0", KEYS.of_shard(0) if encrypted else None)
    keys = KEYS.of_worker(0) if encrypted else None
    client = ZmqClientTransport([server.address], keys, tracked=True)
    piece = bytes(16 * 2**20)
    try:
        send_first(server, client, [b"hello"])
        for _ in range(2):
            while not client.send(0, [b"header", piece, b""]):
                client.receive(0.01)
        received = 0
        while received < 2:
            received += len(server.receive(10))
        for tracker in list(client._trackers[0]):
            tracker.wait(60)
        assert client.unsent(0) == 0
    finally:
        client.close()
        server.close()


def test_an_address_in_use_is_named() -> None:
    first = ZmqServerTransport("tcp://127.0.0.1:0")
    try:
        with pytest.raises(
            TransportError, match=f"cannot listen on {first.address}: Address already in use"
        ):
            ZmqServerTransport(first.address)
    finally:
        first.close()


def test_nonsense_addresses_are_errors() -> None:
    with pytest.raises(TransportError, match="cannot listen on nonsense"):
        ZmqServerTransport("nonsense")
    with pytest.raises(TransportError, match="cannot connect to nonsense"):
        ZmqClientTransport(["nonsense"])
