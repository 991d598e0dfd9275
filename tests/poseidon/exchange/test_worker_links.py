"""The end of connections between workers, with a clock and a wire of the test's own.

`factors/test_peers.py` has them over sockets.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence

import pytest

from poseidon.exchange.worker_links import (
    FIRST,
    LAST,
    LEAVE_MESSAGE,
    LINGER_S,
    LOOK_S,
    POLL_S,
    QueuedMessage,
    WorkerLinks,
    join_message,
)
from ps_server.errors import PeerLost, PeerUnreachable
from ps_server.keys import Keyring
from ps_server.monitor import Monitor
from ps_server.network import Network
from ps_server.protocol.schedule import LinkPriority
from ps_server.transport.base import Frames
from ps_server.transport.retries import MOST_S


class HandFed:
    """Both ends of worker 0 of two, and their clock."""

    address, refused, near = "here", 0, False

    def __init__(self) -> None:
        self.now_s = 0.0
        self.connections = 1
        self.lost: set[int] = set()
        self.inbox: deque[tuple[bytes, Frames]] = deque()
        self.takes = True
        self.with_kernel = True

    def listen(self, host: str, keys: Keyring | None) -> HandFed:
        return self

    def connect(self, addresses: Sequence[str], keys: Keyring | None) -> HandFed:
        return self

    def now(self) -> float:
        return self.now_s

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def blocks(self, peer: int) -> bool:
        return not self.takes

    def send(self, peer: int, frames: Frames) -> bool:
        return self.takes

    def unsent(self, peer: int) -> int:
        return 0 if self.with_kernel else 1

    def describe_loss(self, peer: int) -> str:
        return "the connection"

    def admit_no_more(self) -> None:
        pass

    def known(self, peer: bytes) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self, *, drops: bool = False) -> None:
        pass


@pytest.fixture
def wire() -> HandFed:
    return HandFed()


@pytest.fixture
def links(wire: HandFed) -> WorkerLinks:
    return links_over(wire)


def links_over(wire: HandFed, link: LinkPriority | None = None) -> WorkerLinks:
    network = Network(rank=0, size=2, token=b"secret", wire=wire)  # type: ignore[arg-type]
    monitor = Monitor(1.0, closed="closed", hangs="")
    links = WorkerLinks(
        network, "test", monitor=monitor, receive=lambda rank, frames: None, link=link
    )
    links.begin(["here", "there"])
    wire.inbox.append((b"1", join_message(1, b"secret")))
    return links


def steps_until(links: WorkerLinks, wire: HandFed, until_s: float) -> bool:
    """Make a step every half second; return whether they have ended."""
    steps = links.steps()
    while wire.now_s <= until_s:
        if next(steps, None) is None:
            return True
        wire.now_s += 0.5
    return False


def test_a_peer_that_has_closed_its_own_end_may_still_send(
    wire: HandFed, links: WorkerLinks
) -> None:
    steps_until(links, wire, 1)
    wire.lost.add(0)
    steps_until(links, wire, 9)
    wire.inbox.append((b"1", LEAVE_MESSAGE))
    assert not steps_until(links, wire, 60)
    assert links.left == {1}


@pytest.mark.parametrize(("connections", "within_s"), [(0, 1.5), (1, 10.5)])
def test_a_peer_without_leave_is_lost(
    wire: HandFed, links: WorkerLinks, connections: int, within_s: float
) -> None:
    steps_until(links, wire, 1)
    lost_at_s = wire.now_s
    wire.lost.add(0)
    wire.connections = connections
    with pytest.raises(PeerLost, match=r"lost the connection \(worker 1\)"):
        steps_until(links, wire, 60)
    assert wire.now_s - lost_at_s <= within_s


def test_a_failure_ends_the_waits_for_shards_too(wire: HandFed) -> None:
    network = Network(rank=0, size=2, token=b"secret", wire=wire)  # type: ignore[arg-type]
    own, monitor = (network.new_monitor(closed="closed", hangs="") for _ in range(2))
    links = WorkerLinks(network, "test", monitor=own, receive=lambda rank, frames: None)
    links.fail(PeerLost("lost worker 1"))
    with pytest.raises(PeerLost, match="lost worker 1"):
        monitor.check()


@pytest.mark.parametrize("stuck", ["takes", "with_kernel"])
def test_what_is_queued_at_the_end_survives_a_link_that_is_down_for_five_seconds(
    wire: HandFed, links: WorkerLinks, stuck: str
) -> None:
    setattr(wire, stuck, False)
    assert not steps_until(links, wire, 1)
    links.leave()
    assert not steps_until(links, wire, wire.now_s + 5)
    setattr(wire, stuck, True)
    assert steps_until(links, wire, wire.now_s + 1)


@pytest.mark.parametrize(("link", "wait_s"), [(None, POLL_S), (LinkPriority(), LOOK_S)])
def test_it_looks_often_whether_all_has_left_where_another_sender_waits_for_the_link(
    wire: HandFed, link: LinkPriority | None, wait_s: float
) -> None:
    links = links_over(wire, link)
    wire.with_kernel = False
    assert next(links.steps()) == wait_s
    links.leave()
    assert next(links.steps()) == LOOK_S


def test_a_peer_that_takes_nothing_is_tried_ever_more_rarely(
    wire: HandFed, links: WorkerLinks
) -> None:
    wire.takes = False
    waits_s = []
    steps = links.steps()
    for _ in range(20):
        wait_s = next(steps)
        waits_s.append(round(wait_s, 9))
        wire.now_s += wait_s
    assert waits_s == sorted(waits_s)
    assert waits_s[0] < waits_s[-1] == MOST_S
    wire.lost.add(0)
    next(steps)
    assert next(steps) == POLL_S


def test_the_end_does_not_wait_for_ever(wire: HandFed, links: WorkerLinks) -> None:
    wire.takes = False
    steps_until(links, wire, 1)
    links.leave()
    assert steps_until(links, wire, wire.now_s + LINGER_S + 4)


def test_what_waits_for_a_peer_leaves_by_urgency_and_then_in_its_order() -> None:
    priorities = [2, 1, LAST, 2, FIRST, 1]
    waiting = [QueuedMessage(priority, number, []) for number, priority in enumerate(priorities)]
    assert [each.number for each in sorted(waiting)] == [4, 1, 5, 0, 3, 2]


def test_a_worker_that_cannot_be_reached_is_named() -> None:
    network = Network(rank=0, size=2, ranks=(1, 4), connect_s=0.2)
    monitor = Monitor(60.0, closed="closed", hangs="")
    links = WorkerLinks(network, "test", monitor=monitor, receive=lambda rank, frames: None)
    with socket.socket() as place:  # bound, and nobody listens
        place.bind(("127.0.0.1", 0))
        links.connect([links.address, f"tcp://127.0.0.1:{place.getsockname()[1]}"])
        sentence = "worker 1 on 127.0.0.1 could not connect to worker 4 at .*: Connection refused"
        with pytest.raises(PeerUnreachable, match=sentence):
            monitor.wait_for(lambda: None, "never")
    monitor.interrupt(PeerLost("the test has ended"))
    links.close()
