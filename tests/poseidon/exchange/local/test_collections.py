"""Collections of a machine's workers: in their order, and never for ever."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from poseidon.exchange.base import Ask, ExchangeSettings, Trained
from poseidon.exchange.local.collections import Meetings
from poseidon.exchange.local.group import pack, unpack
from poseidon.exchange.local.line import Kind, Line
from poseidon.exchange.local.siblings import Siblings
from poseidon.exchange.single import LocalExchange
from ps_server import PeerLost, ServerError


class Inner(LocalExchange):
    """Two machines: what this one says, and what another one with as many workers says."""

    def __init__(self) -> None:
        super().__init__([Trained(name="w", tensor=nn.Parameter(torch.zeros(1)))], ExchangeSettings())
        self.asked: list[bytes] = []

    def gather(self, payload: bytes) -> Ask:
        self.asked.append(payload)
        return lambda: (payload, pack([b"x", b""]))


@pytest.fixture
def meeting() -> Iterator[tuple[Meetings, Inner, Line, Siblings]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    own, other = Line(a, "worker 1", 20.0), Line(b, "the leading worker", 20.0)
    siblings, inner = Siblings(20.0), Inner()
    meetings = Meetings(inner, [own], siblings, siblings.fail)
    yield meetings, inner, other, siblings
    meetings.close()
    own.close()
    other.close()


def test_payloads_travel_as_one_and_come_back_as_all(
    meeting: tuple[Meetings, Inner, Line, Siblings],
) -> None:
    meetings, inner, other, siblings = meeting
    meetings.contribute(1, 0, b"follower's")
    ask = meetings.ask(b"leader's")
    expected = (b"leader's", b"follower's", b"x", b"")
    assert siblings.until(ask, "") == expected == ask()
    assert inner.asked == [pack([b"leader's", b"follower's"])]
    told = other.receive()
    assert (told.kind, told.number, unpack(told.payload)) == (Kind.GATHERED, 0, expected)


def test_collections_are_passed_on_in_their_order(
    meeting: tuple[Meetings, Inner, Line, Siblings],
) -> None:
    meetings, inner, _, siblings = meeting
    asks = [meetings.ask(b"%d" % tag) for tag in range(3)]
    assert asks[0]() is None
    for tag in range(3):
        meetings.contribute(1, tag, b"")
    assert [siblings.until(ask, "")[0] for ask in asks] == [b"0", b"1", b"2"]
    assert inner.asked == [pack([b"%d" % tag, b""]) for tag in range(3)]


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_worker_that_has_left_is_not_waited_for(
    meeting: tuple[Meetings, Inner, Line, Siblings], asked_first: bool
) -> None:
    meetings, _, _, siblings = meeting
    ask = meetings.ask(b"") if asked_first else None
    meetings.leave(1)
    ask = ask or meetings.ask(b"")
    with pytest.raises(PeerLost, match=r"^worker 1 of this machine has left before a meeting$"):
        siblings.until(ask, "")


def test_a_collection_that_breaks_is_told_to_all(
    meeting: tuple[Meetings, Inner, Line, Siblings], monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings, inner, _, siblings = meeting

    def broken(ask: Ask) -> tuple[bytes, ...]:
        raise PeerLost("machine 1 has gone")

    monkeypatch.setattr(inner, "gathered", broken)
    ask = meetings.ask(b"")
    meetings.contribute(1, 0, b"")
    with pytest.raises(ServerError, match=r"^machine 1 has gone$"):
        siblings.until(ask, "")
