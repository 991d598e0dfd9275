"""The memory transport keeps the contract, and its faults do what they say."""

from __future__ import annotations

from tests.support.memory_transport import Faults, MemoryNetwork
from tests.support.transport_contract import Pair, check_transport


def pair(faults: Faults | None = None) -> Pair:
    network = MemoryNetwork(1, faults)
    return network.server(0), network.client("worker 0")


def test_contract() -> None:
    check_transport(pair)


def test_contract_with_delays() -> None:
    check_transport(lambda: pair(Faults(seed=3, delay=5)))


def test_links_overtake_each_other_but_keep_their_own_order() -> None:
    network = MemoryNetwork(1, Faults(seed=1, delay=4))
    server = network.server(0)
    clients = [network.client(f"worker {i}") for i in range(3)]
    for i in range(10):
        for client in clients:
            client.send(0, [b"%d" % i])
    got = [(peer, int(bytes(frames[0]))) for peer, frames in server.receive(0.0)]
    assert len(got) == 30
    assert [number for _, number in got] != sorted(number for _, number in got)
    for name in (b"worker 0", b"worker 1", b"worker 2"):
        assert [number for peer, number in got if peer == name] == list(range(10))


def test_drop_repeat_and_cut() -> None:
    server, client = pair(Faults(seed=2, drop=0.5))
    for _ in range(100):
        client.send(0, [b"x"])
    assert 20 < len(server.receive(0.0)) < 80
    server, client = pair(Faults(seed=2, repeat=1.0))
    client.send(0, [b"x"])
    assert len(server.receive(0.0)) == 2
    network = MemoryNetwork(1)
    server, client = network.server(0), network.client("worker 0")
    client.send(0, [b"x"])
    network.cut("worker 0", 0)
    client.send(0, [b"y"])
    assert server.receive(0.0) == []
