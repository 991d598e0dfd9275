"""Job control: who may request, and what a request names.

Its deliveries run in the tests of their exchanges, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.job_control import AloneControl, LinksControl
from poseidon.exchange.peers import Peers
from ps_server import LocalProtocolError, PeerLost, Signal, SignalKind, StalenessTimeout
from tests.poseidon.exchange.allreduce.test_sums import networks
from tests.support.exchanges import AloneExchange


def test_only_the_root_requests() -> None:
    control = AloneControl(root=False)
    with pytest.raises(LocalProtocolError, match=r"^only worker 0 may request 'stop'"):
        control.request(SignalKind.STOP)
    assert control.requests == ()


def test_a_request_of_a_worker_that_is_alone_names_the_iteration_under_way() -> None:
    control = AloneControl()
    control.start(4)
    control.request(SignalKind.SNAPSHOT)
    assert control.requests == (Signal(SignalKind.SNAPSHOT, 5),)
    assert [control.is_asked_for_snapshot(done) for done in (4, 5, 6)] == [False, True, False]


@pytest.mark.parametrize(("ended", "named"), [(False, 8), (True, 9)])
def test_a_request_after_the_end_of_an_iteration_names_the_next_one(
    ended: bool, named: int
) -> None:
    """The loop looks for requests at the end of each iteration; a test or a snapshot may follow,
    and take long.
    """
    trained = Trained(name="w", tensor=torch.zeros(2))
    exchange = AloneExchange([trained], ExchangeSettings(start_clock=7))
    exchange.open(None)
    exchange.start(7, 1.0)
    if ended:
        exchange.finish()
    exchange.control.request(SignalKind.SNAPSHOT)
    assert exchange.control.requests == (Signal(SignalKind.SNAPSHOT, named),)


def test_each_wait_for_a_collection_is_observed_and_no_poll() -> None:
    waits: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        waits.append("begins")
        yield
        waits.append("ends")

    control = AloneControl()
    control.around_wait = around
    collection = control.gather(b"a")
    assert (collection.poll(), waits) == ((b"a",), [])
    assert (collection.result(), waits) == ((b"a",), ["begins", "ends"])
    assert control.root


End = tuple[Peers, LinksControl]


@contextmanager
def controls(workers: int, timeout_s: float = 20.0) -> Iterator[list[End]]:
    """Yield the control of each worker, by rank."""
    ends = []
    for network in networks(workers, timeout_s=timeout_s):
        peers = Peers(network)
        ends.append((peers, LinksControl(peers)))
    addresses = [peers.links.address for peers, _ in ends]
    for peers, _ in ends:
        peers.links.connect(addresses)
    try:
        yield ends
    finally:
        for peers, _ in ends:
            peers.close(0)


def test_each_worker_has_the_payloads_of_all_by_rank() -> None:
    with controls(3) as ends:
        begun = [control.gather(b"payload %d" % rank) for rank, (_, control) in enumerate(ends)]
        expected = (b"payload 0", b"payload 1", b"payload 2")
        assert [one.result() for one in begun] == [expected] * 3
        assert [one.poll() for one in begun] == [expected] * 3
        assert all(not control._collections.payloads for _, control in ends)


def test_only_who_needs_the_payloads_gets_them() -> None:
    with controls(3) as ends:
        for to, expected in ((1, 2), (b"0", b"1", b"2")), ((), ()), (None, (b"0", b"1", b"2")):
            begun = [control.gather(b"%d" % rank, to) for rank, (_, control) in enumerate(ends)]
            for rank, one in enumerate(begun):
                assert one.result() == (expected if to is None or rank in to else ())
        assert all(not control._collections.payloads for _, control in ends)


def test_one_worker_is_a_collection_of_its_own() -> None:
    with controls(1) as [(_, control)]:
        assert control.gather(b"own").poll() == (b"own",)


def test_a_worker_may_be_ahead_by_several_collections() -> None:
    with controls(2) as [(_, first), (_, second)]:
        ahead = [second.gather(b"%d" % number) for number in range(3)]
        for number, one in enumerate(ahead):
            assert one.poll() is None
            first.gather(b"own")
            assert one.result() == (b"own", b"%d" % number)


def test_a_collection_without_a_worker_ends_at_its_limit() -> None:
    with (
        controls(2, timeout_s=0.05) as [_, (_, second)],
        pytest.raises(StalenessTimeout, match=r"within 0.05 s"),
    ):
        second.gather(b"").result()


def test_nobody_waits_for_a_worker_that_has_left() -> None:
    with controls(3) as ends:
        begun = [control.gather(b"%d" % rank) for rank, (_, control) in enumerate(ends)]
        ends[2][0].close(7)
        assert begun[0].result() == begun[1].result() == (b"0", b"1", b"2")
        sentence = (
            r"^worker 2 has left after 7 iterations, and worker 0 continues: all workers must make "
        )
        with pytest.raises(PeerLost, match=sentence):
            ends[0][1].gather(b"3").result()


def test_a_wait_ends_where_this_worker_leaves() -> None:
    with controls(2) as [(first, control), _]:
        waiting = control.gather(b"")
        first.close(0)
        with pytest.raises(LocalProtocolError, match="connections to the other workers are closed"):
            waiting.result()
        with pytest.raises(LocalProtocolError, match="connections to the other workers are closed"):
            control.gather(b"")


def test_requests_leave_with_the_next_iteration_and_name_the_end_of_the_one_after() -> None:
    with controls(2) as [(_, first), (_, second)]:
        stop, snapshot = SignalKind.STOP, SignalKind.SNAPSHOT
        first.request(snapshot)
        assert first.requests == ()
        first.start(5)
        first.request(stop)
        first.start(6)
        collections = [control.gather(b"") for control in (first, second)]
        assert collections[1].result() == (b"", b"")  # it has left after the requests
        assert first.requests == second.requests == (Signal(snapshot, 7), Signal(stop, 8))
