"""Collections of a machine's workers: in their order, and never for ever."""

from __future__ import annotations

import socket
from collections.abc import Container, Iterator

import pytest

from poseidon.exchange.job_control import JobControl, join, split
from poseidon.exchange.local.connection import Connection, Kind
from poseidon.exchange.local.group import HostTree, LocalGroup
from poseidon.exchange.local.host_delivery import LeaderDelivery
from ps_server import Collection, PeerLost, ServerError, Signal, SignalKind
from ps_server.monitor import Monitor
from ps_server.network import Network


class Inner:
    """Job control between two hosts: what this one contributes, and what another one with as
    many workers does.
    """

    def __init__(self) -> None:
        self.contributed: list[bytes] = []
        self.to: list[Container[int] | None] = []
        self.broken: ServerError | None = None
        self.requests: tuple[Signal, ...] = ()

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        self.contributed.append(payload)
        self.to.append(to)
        found = (payload, join([b"x", b""])) if to is None or 0 in to else ()

        def result() -> tuple[bytes, ...]:
            if self.broken is not None:
                raise self.broken
            return found

        return Collection(lambda: found, result)

    def request(self, kind: SignalKind) -> None:
        self.requests += (Signal(kind, 7),)


Rig = tuple[LeaderDelivery, Inner, Connection, Monitor]


@pytest.fixture
def rig() -> Iterator[Rig]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    own, other = Connection(a, "worker 1", 20.0), Connection(b, "the leading worker", 20.0)
    monitor, inner = (
        LocalGroup(
            address="", network=Network(size=2, timeout_s=20.0), tree=HostTree.mean(2)
        ).new_monitor(),
        Inner(),
    )
    delivery = LeaderDelivery(JobControl(inner, root=True), [own], monitor, monitor.fail)
    yield delivery, inner, other, monitor
    delivery.close()
    own.close()
    other.close()


def test_payloads_travel_as_one_and_come_back_as_all(rig: Rig) -> None:
    delivery, inner, other, _ = rig
    delivery.contribute(1, 0, b"follower's")
    collection = delivery.gather(b"leader's")
    expected = (b"leader's", b"follower's", b"x", b"")
    assert collection.result() == expected == collection.poll()
    assert inner.contributed == [join([b"leader's", b"follower's"])]
    sent = other.receive()
    assert (sent.kind, sent.number, tuple(split(sent.payload))) == (Kind.GATHERED, 0, expected)


@pytest.mark.parametrize(
    "workers, hosts, received",
    [({1, 5}, {0, 2}, (b"leader's", b"follower's", b"x", b"")), ({2}, {1}, ())],
)
def test_only_hosts_of_workers_that_need_the_payloads_get_them(
    rig: Rig, workers: set[int], hosts: set[int], received: tuple[bytes, ...]
) -> None:
    delivery, inner, other, _ = rig
    collection = delivery.gather(b"leader's", workers)
    delivery.contribute(1, 0, b"follower's")
    assert collection.result() == tuple(split(other.receive().payload)) == received
    (to,) = inner.to
    assert to is not None
    assert {host for host in range(4) if host in to} == hosts


def test_collections_are_passed_on_in_their_order(rig: Rig) -> None:
    delivery, inner, _, _ = rig
    collections = [delivery.gather(b"%d" % number) for number in range(3)]
    assert collections[0].poll() is None
    for number in range(3):
        delivery.contribute(1, number, b"")
    assert [collection.result()[0] for collection in collections] == [b"0", b"1", b"2"]
    assert inner.contributed == [join([b"%d" % number, b""]) for number in range(3)]


@pytest.mark.parametrize("gathers_first", [True, False])
def test_a_worker_that_has_left_is_not_waited_for(rig: Rig, gathers_first: bool) -> None:
    delivery = rig[0]
    collection = delivery.gather(b"") if gathers_first else None
    delivery.leave(1)
    collection = collection or delivery.gather(b"")
    with pytest.raises(PeerLost, match=r"^worker 1 of this machine has left before a collection$"):
        collection.result()


def test_a_collection_that_fails_fails_for_all(rig: Rig) -> None:
    delivery, inner, _, _ = rig
    inner.broken = PeerLost("machine 1 has gone")
    collection = delivery.gather(b"")
    delivery.contribute(1, 0, b"")
    with pytest.raises(ServerError, match=r"^machine 1 has gone$"):
        collection.result()


def test_any_error_of_the_collecting_thread_reaches_whoever_waits(rig: Rig) -> None:
    delivery, inner, _, _ = rig
    inner.broken = ValueError("no length")  # type: ignore[assignment]
    collection = delivery.gather(b"")
    delivery.contribute(1, 0, b"")
    with pytest.raises(PeerLost, match=r"collections of this machine's workers failed: ValueError"):
        collection.result()


def test_a_request_waits_for_an_iteration_and_is_announced_once(rig: Rig) -> None:
    delivery, inner, other, _ = rig
    delivery.request(SignalKind.STOP)
    assert inner.requests == ()
    delivery.submit()
    assert delivery.requests == inner.requests == (Signal(SignalKind.STOP, 7),)
    delivery.announce()
    delivery.announce()
    delivery.contribute(1, 0, b"")
    delivery.gather(b"").result()
    assert [other.receive().kind for _ in range(2)] == [Kind.SIGNALS, Kind.GATHERED]
