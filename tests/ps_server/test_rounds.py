"""The rounds of a shard's process: each has an address and a store of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ps_server import Client, Server, Shard, StoreSpec, TableSpec, ZmqServerTransport
from ps_server.errors import LocalProtocolError, ServerError
from ps_server.network import Network
from ps_server.rounds import Rounds
from tests.support.cluster import TIMEOUT_S, TOKEN, zeros
from tests.support.memory_transport import MemoryNetwork


def on_sockets() -> Rounds:
    return Rounds(lambda _: Server(Shard(0, 1, TOKEN), ZmqServerTransport("tcp://127.0.0.1:0")))


def step(client: Client, gradient: float) -> float:
    value = np.zeros(2, np.float32)
    client.push(0, np.full(2, gradient, np.float32), rate=1.0)
    client.clock()
    client.read(0, value)
    return float(value[0])


def test_the_stores_of_two_rounds_are_apart() -> None:
    rounds = on_sockets()
    store = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=2),))
    network = Network(token=TOKEN, timeout_s=TIMEOUT_S)
    clients = [Client([rounds.listen()], network, store) for _ in range(2)]
    for client in clients:
        client.start(zeros(store))
    assert [step(client, 1.0 + i) for i, client in enumerate(clients)] == [-1.0, -2.0]
    assert step(clients[0], 1.0) == -2.0
    clients[0].close()
    assert step(clients[1], 1.0) == -3.0
    assert rounds.statistics().updates == 4
    clients[1].close()
    rounds.wait(stays=False)


def test_a_round_may_follow_after_all_have_left() -> None:
    rounds = on_sockets()
    store = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=2),))
    for _ in range(2):
        client = Client([rounds.listen()], Network(token=TOKEN, timeout_s=TIMEOUT_S), store)
        client.start(zeros(store))
        client.close()
        rounds.wait(stays=False)
    rounds.stop()
    rounds.wait(stays=True)


def test_an_error_of_one_round_ends_all() -> None:
    network = MemoryNetwork(2)
    rounds = Rounds(lambda number: Server(Shard(0, 1), network.server(number)))
    rounds.listen()
    rounds.listen()
    rounds._servers[1].fail(LocalProtocolError("broken"))
    with pytest.raises(ServerError, match=r"^broken$"):
        rounds.wait(stays=True)


def test_a_shard_moves_while_each_of_its_rounds_does() -> None:
    network = MemoryNetwork(2)
    servers = [Server(Shard(0, 1), network.server(number)) for number in range(2)]
    rounds = Rounds(lambda number: servers[number])
    assert rounds.moves()
    rounds._running = servers
    assert rounds.moves()
    servers[0].turns += 1
    assert not rounds.moves()
    servers[0].turns += 1
    servers[1].turns += 1
    assert rounds.moves()


def test_a_shard_computes_with_one_thread_in_the_environment_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []
    monkeypatch.setattr("ps_server.rounds.prepare_thread", lambda: did.append("prepared"))
    served: Any = SimpleNamespace(address="", serve=lambda: did.append("served"))
    rounds = Rounds(lambda number: served)
    rounds.listen()
    rounds.wait(stays=False)
    assert did == ["prepared", "served"]
