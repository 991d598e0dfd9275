"""Messages between workers that sum: what is none is refused, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from poseidon.exchange.allreduce.sums import Sums
from poseidon.exchange.device import HOST
from poseidon.exchange.job_control import KINDS, LinksControl
from poseidon.exchange.peers import Peers
from poseidon.exchange.worker_links import VERSION
from ps_server import PeerLeft, RemoteProtocolError
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.poseidon.exchange.allreduce.test_sums import networks


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (["Mean", 0], b""),
        (["Part", 0, 0], bytes(4)),
        (["Part", 0, 0, "0"], bytes(4)),
        (["Part", 0, 0, 0], bytes(8)),
        (["Part", 0, 0, 0], b""),
        (["Part", 1, 0, 0], bytes(4)),
        (["Part", -1, 0, 0], bytes(4)),
        (["Values", 0, 0], bytes(4)),
        (["Mean", 0, 0], bytes(4)),
        (["Gather", -1], b"out of turn"),
        (["Gather", True], b""),
        (["Gather", 0, "x"], b""),
        (["Request", 1, 5], b""),
        (["Finished"], b""),
        ([0], b""),
        ([], b""),
    ],
    ids=str,
)
def test_what_is_no_message_is_refused(header: list[object], payload: bytes) -> None:
    peers = Peers(networks(2)[0])
    control = LinksControl(peers)
    sums = Sums({0: 2}, peers, VirtualWorkers.one_each(2), HOST)
    with pytest.raises(RemoteProtocolError), peers.monitor:
        peers._receive(1, [msgpack.packb([VERSION, *header]), payload])
    assert not control.requests
    assert not control._collections.payloads
    assert not sums._adding._queued
    sums.close(0)


def test_a_refused_message_names_its_sender_by_its_rank_in_the_job() -> None:
    peers = Peers(replace(networks(2)[0], ranks=(1, 4)))
    sums = Sums({0: 2}, peers, VirtualWorkers.one_each(2), HOST)
    header = msgpack.packb([VERSION, "Values", 0, 0])
    with pytest.raises(RemoteProtocolError, match=r"^worker 4: values came"), peers.monitor:
        peers._receive(1, [header, bytes(4)])
    sums.close(0)


def test_a_worker_without_an_address_is_named_by_its_rank_in_the_job() -> None:
    peers = Peers(replace(networks(2)[0], ranks=(1, 4)))
    with pytest.raises(RemoteProtocolError, match=r"^worker 4 sent no address"):
        peers.addresses([{"sums": "tcp://127.0.0.1:1"}, {"sums": None}], "sums")
    peers.close(0)


def test_a_request_of_no_kind_is_refused() -> None:
    peers = Peers(networks(2)[1])
    LinksControl(peers)
    with pytest.raises(RemoteProtocolError), peers.monitor:
        peers._receive(0, [msgpack.packb([VERSION, "Request", max(KINDS) + 1, 5]), b""])
    peers.close(0)


def test_a_worker_that_has_left_is_named_where_it_is_missing() -> None:
    first, second = (Peers(network) for network in networks(2))
    for peers in (first, second):
        peers.links.connect([first.links.address, second.links.address])
    second.close(4)
    first.monitor.wait_for(lambda: True if 1 in first.links.left else None, "it did not leave")
    first.check_left(3)
    for iteration, missing in ((4, ()), (0, (1,))):
        with pytest.raises(PeerLeft, match=r"^worker 1 has left after 4 iterations, and worker 0 "):
            first.check_left(iteration, missing)
    first.close(4)
