"""Job control without shards: collections in the store of the rendezvous, and requests in the
sums of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import create_autospec

import pytest
from torch import Tensor

from poseidon.exchange.allreduce import allreduce_delivery
from poseidon.exchange.allreduce.allreduce_delivery import (
    PIECE_BYTES,
    AllReduceDelivery,
    StoreCollections,
)
from poseidon.exchange.allreduce.process_group import Rendezvous
from ps_server import LocalProtocolError, PeerLost, Signal, SignalKind, StalenessTimeout
from ps_server.network import Network

TIMEOUT_S = 20.0


@contextmanager
def collections(workers: int, timeout_s: float = TIMEOUT_S) -> Iterator[list[StoreCollections]]:
    """Those of each worker, by rank."""
    settings = [
        Network(rank=rank, size=workers, host="127.0.0.1", timeout_s=timeout_s)
        for rank in range(workers)
    ]
    first = Rendezvous(settings[0])
    others = [Rendezvous(one, first.address) for one in settings[1:]]
    made = [StoreCollections(r, s) for r, s in zip([first, *others], settings, strict=True)]
    try:
        yield made
    finally:
        for each in reversed(made):
            leave(each)


def leave(of: StoreCollections, iterations: int = 0) -> None:
    of.leave(iterations)
    of.close()


def keys(of: StoreCollections) -> set[str]:
    return {str(key) for key in of._store.list_keys()}


def test_each_worker_has_the_payloads_of_all_by_rank_and_the_last_reader_deletes_them() -> None:
    with collections(3) as workers:
        before = keys(workers[0])
        begun = [worker.contribute(b"payload %d" % rank) for rank, worker in enumerate(workers[:2])]
        assert [one.poll() for one in begun] == [None, None]
        begun.append(workers[2].contribute(b""))
        expected = (b"payload 0", b"payload 1", b"")
        assert [one.result() for one in begun] == [expected] * 3
        assert [one.poll() for one in begun] == [expected] * 3
        assert keys(workers[0]) == before


@pytest.mark.parametrize("size", [PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])
def test_a_payload_may_be_larger_than_a_value_of_the_store(size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    with collections(2) as workers:
        before = keys(workers[0])
        small, large = workers[1].contribute(b"small"), workers[0].contribute(payload)
        assert small.result() == large.result() == (payload, b"small")
        assert keys(workers[0]) == before


def test_a_worker_may_be_ahead_by_several_collections() -> None:
    with collections(2) as workers:
        ahead = [workers[1].contribute(b"%d" % number) for number in range(3)]
        for number, one in enumerate(ahead):
            assert one.poll() is None
            workers[0].contribute(b"own")
            assert one.result() == (b"own", b"%d" % number)


def test_a_collection_without_a_worker_ends_at_its_limit() -> None:
    with (
        collections(2, timeout_s=0.05) as workers,
        pytest.raises(StalenessTimeout, match=r"within 0.05 s"),
    ):
        workers[1].contribute(b"").result()


def test_nobody_waits_for_a_worker_that_has_left() -> None:
    with collections(3) as workers:
        begun = [workers[0].contribute(b"0"), workers[1].contribute(b"1")]
        workers[2].contribute(b"2")
        leave(workers[2], iterations=7)
        assert [one.result() for one in begun] == [(b"0", b"1", b"2")] * 2
        later = workers[0].contribute(b"3")
        sentence = r"^worker 2 has left after 7 iterations, and worker 0 goes on: all workers must make equally many"
        with pytest.raises(PeerLost, match=sentence):
            later.result()
        workers[0].check_left(6)
        with pytest.raises(PeerLost, match=sentence):
            workers[0].check_left(7)


def test_a_wait_ends_where_this_worker_leaves() -> None:
    with collections(2) as workers, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(workers[1].contribute(b"").result)
        leave(workers[1])
        with pytest.raises(LocalProtocolError, match="the exchange is closed"):
            waiting.result()
        with pytest.raises(LocalProtocolError, match="the exchange is closed"):
            workers[1].contribute(b"")


def test_rank_0_leaves_once_the_others_have_read_what_is_complete() -> None:
    with collections(3) as workers, ThreadPoolExecutor(1) as pool:
        begun = [worker.contribute(b"%d" % rank) for rank, worker in enumerate(workers)]
        workers[1].contribute(b"never complete")
        expected = begun[0].result()
        leaving = pool.submit(leave, workers[0])
        assert begun[1].result() == expected
        assert not leaving.done()
        leave(workers[2])  # which has not read it, and never will
        leaving.result(TIMEOUT_S)


def test_rank_0_waits_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce_delivery, "LINGER_S", 0.0)
    with collections(2) as workers:
        for worker in workers:
            worker.contribute(b"")
        leave(workers[0])


def test_the_end_of_rank_0_is_one_sentence() -> None:
    settings = [
        Network(rank=rank, size=2, host="127.0.0.1", timeout_s=TIMEOUT_S) for rank in range(2)
    ]
    first = Rendezvous(settings[0])
    other = StoreCollections(Rendezvous(settings[1], first.address), settings[1])
    begun = other.contribute(b"")
    del first
    with pytest.raises(PeerLost, match=r"^could not gather with the other workers: .+") as caught:
        begun.result()
    assert "\n" not in str(caught.value)
    leave(other)


def test_rank_0_forgets_the_collections_that_are_deleted() -> None:
    with collections(2) as workers:
        for _ in range(5):
            for one in [worker.contribute(b"") for worker in workers]:
                one.result()
        assert len(workers[0]._stored) == 1


def test_requests_that_are_summed_name_the_clock_given_and_come_once() -> None:
    other = [
        1.0,
        0.0,
    ]  # what rank 0 has requested, as this worker, which contributes zeros, receives it

    def start_sum(tensor: Tensor) -> Callable[[], None]:
        def finish() -> None:
            assert tensor.tolist() == [0.0, 0.0]
            for place, count in enumerate(other):
                tensor[place] = count

        return finish

    delivery = AllReduceDelivery(create_autospec(StoreCollections, instance=True))
    for clock in (7, 8):
        delivery.start(start_sum)
        delivery.finish(clock)
    first, second = SignalKind
    assert delivery.requests == (Signal(first, 7),)
    other[1] = 2.0
    delivery.start(start_sum)
    delivery.finish(9)
    assert delivery.requests == (Signal(first, 7), Signal(second, 9), Signal(second, 9))
