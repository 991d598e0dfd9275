from __future__ import annotations

import pytest

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.collections_and_signals import (
    MAX_OPEN_GATHERS,
    ShardCollections,
    WorkerCollections,
    WorkerSignals,
)


def test_a_collection_has_the_payloads_by_rank_whoever_comes_first() -> None:
    shard, workers = ShardCollections(range(3)), [WorkerCollections(3) for _ in range(3)]
    gathers = [worker.contribute(b"%d" % rank) for rank, worker in enumerate(workers)]
    assert shard.contribute(2, gathers[2]) == {}
    assert shard.contribute(0, gathers[0]) == {}
    assert shard.behind(1, 0) and not shard.behind(0, 2)
    found = shard.contribute(1, gathers[1])
    gathered = m.Gathered(0, (b"0", b"1", b"2"))
    assert found == dict.fromkeys(range(3), gathered)
    for worker in workers:
        assert worker.take(0) is None
        assert worker.expects(gathered)
        worker.receive(gathered)
        assert not worker.expects(gathered)
        assert (worker.take(0), worker.take(0)) == (gathered.payloads, None)


def test_only_who_needs_the_payloads_gets_them() -> None:
    shard, workers = ShardCollections(range(2)), [WorkerCollections(2) for _ in range(2)]
    gathers = [
        worker.contribute(b"%d" % rank, keeps=rank == 1) for rank, worker in enumerate(workers)
    ]
    shard.contribute(0, gathers[0])
    found = shard.contribute(1, gathers[1])
    assert found == {0: m.Gathered(0, ()), 1: m.Gathered(0, (b"0", b"1"))}
    for rank, worker in enumerate(workers):
        assert not worker.expects(found[1 - rank])
        assert worker.expects(found[rank])
        worker.receive(found[rank])
        assert worker.take(0) == found[rank].payloads


def test_what_is_not_expected() -> None:
    shard, worker = ShardCollections(range(2)), WorkerCollections(2)
    with pytest.raises(RemoteProtocolError, match="gathers 1; expected 0"):
        shard.contribute(0, m.Gather(1, b""))
    for tag in range(MAX_OPEN_GATHERS):
        shard.contribute(0, m.Gather(tag, b""))
    with pytest.raises(RemoteProtocolError, match=f"is {MAX_OPEN_GATHERS} collections ahead"):
        shard.contribute(0, m.Gather(MAX_OPEN_GATHERS, b""))
    worker.contribute(b"")
    assert not worker.expects(m.Gathered(0, (b"",)))
    assert not worker.expects(m.Gathered(1, (b"", b"")))


def test_a_signal_counts_once_and_not_before_the_welcome() -> None:
    signals, stop = WorkerSignals(1).renewed(), m.Signal(m.SignalKind.STOP, 5)
    signals.welcome(0)
    signals.receive(0, stop)
    assert signals.all == []  # the `Welcome` may answer `Hello`: a shard may be late
    signals.welcome(0)
    signals.receive(1, stop)
    signals.receive(0, stop)
    signals.receive(0, stop)
    assert signals.all == [stop]
    with pytest.raises(LocalProtocolError, match="worker 1 signals; only worker 0 may"):
        signals.send(m.SignalKind.STOP, 7)
