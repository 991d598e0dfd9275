"""The store of shard 0: what is not there, not free, or no request; `test_stores.py` has what
all stores do.
"""

from __future__ import annotations

import gc
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from poseidon.caffe2.shards.stores import TcpStore
from poseidon.errors import JobError
from tests.support.free_ports import free_ports


def test_a_rendezvous_by_tcp_that_is_not_there() -> None:
    (port,) = free_ports(1)
    with pytest.raises(
        JobError, match=rf"^the rendezvous at 127.0.0.1:{port} cannot be reached within 0.2 s"
    ):
        TcpStore("127.0.0.1", port, timeout_s=0.2)
    served = TcpStore("127.0.0.1", port, serve=True)
    with pytest.raises(
        JobError, match=rf"^cannot serve the rendezvous at 127.0.0.1:{port}: Address already"
    ):
        TcpStore("127.0.0.1", port, serve=True)
    client = TcpStore("127.0.0.1", port)
    del served
    gc.collect()
    with pytest.raises(JobError, match=rf"^the rendezvous at 127.0.0.1:{port} ended"):
        client.set("a", b"")


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{}\n", b"[1]\n", b"\xff\n", b'{"kind": "add", "key": "a", "value": "x"}\n'],
)
def test_what_is_no_request_is_dropped(line: bytes) -> None:
    (port,) = free_ports(1)
    store = TcpStore("127.0.0.1", port, serve=True)
    with socket.create_connection(("127.0.0.1", port), 10) as stranger:
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    store.set("a", b"1")
    assert store.get("a") == b"1"


@pytest.mark.parametrize(
    "answer",
    [b"{}\n", b"null\n", b"[" * 100_000, b'{"value": 1.5}\n', b'{"value": "x"}\n', b"\xff"],
)
def test_what_is_no_store_is_one_sentence(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            for _ in range(4):  # the first one only asks whether there is a server
                with server.accept()[0] as connection, connection.makefile("rb") as requests:
                    if requests.readline():
                        connection.sendall(answer)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(serve)
            store = TcpStore("127.0.0.1", port)
            for call in (
                store.find,
                lambda key: store.set(key, b""),
                lambda key: store.add(key, 1),
            ):
                with pytest.raises(JobError, match=rf"at 127.0.0.1:{port} is not the store of a"):
                    call("a")
