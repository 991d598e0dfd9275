"""A shard and whoever is not of its job, while one worker is still to come: nothing is read,
pushed, stopped or listed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import zmq

from ps_server import Client, Server, Shard, StoreSpec, TableSpec, ZmqServerTransport
from ps_server.keys import JobKeys, KeyPair, Keyring
from ps_server.network import Network
from ps_server.protocol import messages as m
from ps_server.protocol.frames import encode
from ps_server.transport.zmq_sockets import ZmqClientTransport
from tests.support.cluster import TIMEOUT_S, TOKEN, zeros
from tests.support.polling import until
from tests.support.shard_requests import every_request

KEYS = JobKeys.new(workers=2, shards=1)
STORE = StoreSpec(workers=2, shards=1, tables=(TableSpec(name="w", size=4),))
ONES = np.ones(4, dtype=np.float32)
EVERYTHING = every_request(STORE, TOKEN)


@contextmanager
def shard() -> Iterator[Server]:
    server = Server(Shard(0, 2, TOKEN), ZmqServerTransport("tcp://127.0.0.1:0", KEYS.of_shard(0)))
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def worker(server: Server, rank: int) -> Client:
    return Client(
        [server.address],
        Network(
            rank=rank,
            size=STORE.workers,
            token=TOKEN,
            keys=KEYS.of_worker(rank),
            timeout_s=TIMEOUT_S,
        ),
        store=STORE,
    )


@pytest.mark.parametrize(
    "keys",
    [None, Keyring(own=KeyPair.new(), expect=(KEYS.shards[0].public,))],
    ids=["in clear", "another key"],
)
def test_who_knows_the_token_and_the_protocol_but_has_no_key_of_the_job(
    keys: Keyring | None,
) -> None:
    with shard() as server:
        first = worker(server, 0)
        stranger = ZmqClientTransport([server.address], keys)
        for message in EVERYTHING:
            stranger.send(0, encode(message))
        until(lambda: server.statistics().refused >= 1, "the stranger did not knock", TIMEOUT_S)
        second = worker(server, 1)
        starts = [
            threading.Thread(target=client.start, args=(zeros(STORE),), name="start")
            for client in (first, second)
        ]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join()
        for client in (first, second):
            client.push(0, ONES, rate=1.0)
            client.clock()
        for client in (first, second):
            value = np.empty(4, dtype=np.float32)
            client.read(0, value)
            assert value.tolist() == [-1, -1, -1, -1]
            assert client.signals == ()
        heard = stranger._sockets[0]
        heard.setsockopt(zmq.LINGER, 0)
        assert not heard.poll(0)
        stranger.close()
        for client in (first, second):
            client.close()
        until(
            lambda: server.shard.members.finished, "the shard did not hear the goodbyes", TIMEOUT_S
        )
        assert server.shard.counts.faults == 0
        # and worker 0 brings the value
        messages = 2 * len((m.Hello, m.Create, m.Push, m.Leave)) + 1
        assert server.statistics().messages_in == messages
