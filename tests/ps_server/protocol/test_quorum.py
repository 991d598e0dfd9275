"""Rounds that a quorum ends: the decision, and sessions with shards that follow it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from ps_server import LocalProtocolError, RemoteProtocolError, Shard, StoreSpec, TableSpec
from ps_server.errors import SpecError
from ps_server.protocol import messages as m
from ps_server.protocol.members import Outgoing
from ps_server.protocol.messages import Addressed
from ps_server.protocol.quorum import ShardRounds, shares_of
from ps_server.protocol.settings import Keeping, Precision, Rule, RuleKind
from ps_server.protocol.worker_session import Session

PART = m.Part(0, 1.0, whole=False, payload=b"")
WHOLE = m.Part(0, 1.0, whole=True, payload=b"")


@pytest.mark.parametrize(
    ("needed", "grace_s", "parts", "now_s", "ended"),
    [
        (2, 0.0, {}, 0.0, None),
        (2, 0.0, {1: PART}, 9.0, None),
        (2, 0.0, {1: PART, 0: PART}, 0.0, (0, 1)),  # in the order of ranks
        (2, 0.0, {1: WHOLE, 0: PART}, 9.0, None),  # it waits for all
        (2, 0.0, {1: WHOLE, 0: PART, 2: PART}, 0.0, (0, 1, 2)),
        (2, 5.0, {1: PART, 0: PART}, 4.9, None),
        (2, 5.0, {1: PART, 0: PART}, 5.0, (0, 1)),
        (2, 5.0, {1: PART, 0: PART, 2: PART}, 0.0, (0, 1, 2)),  # all are there: no grace
        (1, 0.0, {2: PART}, 0.0, (2,)),
        (3, 5.0, {1: PART, 0: PART}, 99.0, None),
    ],
)
def test_a_round_ends_with_a_quorum_after_the_grace_or_with_all(
    needed: int,
    grace_s: float,
    parts: dict[int, m.Part],
    now_s: float,
    ended: tuple[int, ...] | None,
) -> None:
    rounds = ShardRounds(3, needed, grace_s, clock=7)
    for rank, part in parts.items():
        rounds.add(rank, part)
    first = rounds.decide(0.0)
    decided = first or rounds.decide(now_s)
    assert (None if decided is None else (decided.clock, decided.workers)) == (
        None if ended is None else (7, ended)
    )
    assert rounds.clock == (7 if ended is None else 8)


def test_the_grace_begins_with_the_quorum_and_anew_in_each_round() -> None:
    rounds = ShardRounds(3, 2, 5.0, clock=0)
    rounds.add(0, PART)
    assert rounds.decide(10.0) is None
    assert rounds.wait_s(10.0) is None
    rounds.add(1, PART)
    assert rounds.decide(20.0) is None
    assert rounds.wait_s(22.0) == 3.0
    assert rounds.decide(25.0) is not None
    rounds.add(2, PART)  # late: of the next round
    assert rounds.decide(99.0) is None
    rounds.add(0, PART)
    assert rounds.decide(100.0) is None
    assert rounds.decide(104.9) is None
    decided = rounds.decide(105.0)
    assert decided is not None
    assert decided.workers == (0, 2)


def test_a_round_that_waits_says_once_for_whom() -> None:
    rounds = ShardRounds(3, 2, 5.0, clock=0)
    for rank, expected in ((1, []), (0, [2]), (2, [])):
        rounds.add(rank, PART)
        rounds.decide(0.0)
        assert rounds.awaited() == expected
    rounds.add(1, PART)
    rounds.add(2, PART)
    assert rounds.decide(0.0) is None
    assert rounds.awaited() == [0]
    assert rounds.awaited() == []


def test_a_worker_has_one_part_in_a_round() -> None:
    rounds = ShardRounds(3, 2, 0.0, clock=0)
    rounds.add(1, PART)
    with pytest.raises(RemoteProtocolError, match="worker 1 has a part in round 0 already"):
        rounds.add(1, PART)


def test_other_shards_take_each_decision_once_and_in_order() -> None:
    rounds = ShardRounds(3, 2, 0.0, clock=0)
    first, second = m.Round(0, (0, 1), (1.0, 1.0), (b"", b"")), m.Round(1, (2,), (1.0,), (b"",))
    with pytest.raises(RemoteProtocolError, match="round 1 of workers"):
        rounds.follow(second)
    assert rounds.follow(first) == first
    assert rounds.follow(first) is None
    assert rounds.follow(second) == second


@pytest.mark.parametrize(
    ("weights", "shares"), [([1.0, 3.0], [0.25, 0.75]), ([0.0, 0.0], [0.5, 0.5])]
)
def test_the_shares_of_parts(weights: list[float], shares: list[float]) -> None:
    assert shares_of(weights) == shares


TABLES = (
    TableSpec(name="w", size=6, rows=3, rule=Rule(momentum=0.5)),
    TableSpec(name="mean", size=2, keeping=Keeping.AVERAGE),
    TableSpec(name="copy", size=2, keeping=Keeping.COPY),
)
STORE = StoreSpec(workers=3, shards=2, tables=TABLES, quorum=2, grace_s=5.0)


@pytest.mark.parametrize(
    "more",
    [
        {"quorum": 3},
        {"grace_s": -1.0},
        {"precision": Precision.FLOAT16},
        {"clip": 1.0},
        {"tables": (TableSpec(name="stale", size=2, staleness=1),)},
    ],
)
def test_what_a_quorum_needs(more: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        replace(STORE, **more)  # type: ignore[arg-type]


class Wire:
    """Sessions of three workers and two shards. Messages of workers in `stopped` stay."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.shards = [Shard(index, 3) for index in range(2)]
        self.workers = [Session(rank, STORE) for rank in range(3)]
        self.stopped: set[int] = set()
        self.queue: deque[tuple[int, Addressed]] = deque()
        for rank, worker in enumerate(self.workers):
            self.send(rank, worker.start(lambda i: [np.zeros(TABLES[i].size, np.float32)]))
        self.deliver()

    def send(self, rank: int, messages: list[Addressed]) -> None:
        self.queue.extend((rank, message) for message in messages)

    def deliver(self) -> None:
        """Move messages until only messages of workers that have stopped are left."""
        kept: deque[tuple[int, Addressed]] = deque()
        while self.queue:
            rank, (shard, message) = self.queue.popleft()
            if rank in self.stopped:
                kept.append((rank, Addressed(shard, message)))
                continue
            name = b"%d" % rank
            self.answer(shard, self.shards[shard].handle(name, message))
            self.answer(shard, self.shards[shard].advance(self.now_s))
        self.queue = kept

    def answer(self, shard: int, outgoing: list[Outgoing]) -> None:
        for peer, message in outgoing:
            rank = int(peer)
            if isinstance(message, m.Value):
                self.workers[rank].values.land(shard, message)
            self.send(rank, self.workers[rank].receive(shard, message))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for index, shard in enumerate(self.shards):
            self.answer(index, shard.advance(self.now_s))
        self.deliver()

    def end_part(
        self, rank: int, gradient: float, weight: float = 1.0, *, whole: bool = False
    ) -> None:
        worker = self.workers[rank]
        for table in range(2):
            array = np.full(TABLES[table].size, gradient, np.float32)
            self.send(rank, worker.push(table, array, 1.0))
        worker.describe_part(weight, b"%d" % rank, whole=whole)
        self.send(rank, worker.tick())
        self.deliver()

    def ended(self, rank: int) -> tuple[tuple[int, ...], int, list[float]] | None:
        """Return the members of the round of a worker's part, its next clock, and its values."""
        decided = self.workers[rank].end_round()
        if decided is None:
            return None
        first: list[float] = []
        for table in range(2):
            pieces = self.workers[rank].values.take(table)
            assert sum(piece.stop - piece.start for piece in pieces) == TABLES[table].size
            first.append(float(pieces[-1].value[-1]))
        return decided.workers, self.workers[rank].clock, first


def test_a_quorum_goes_on_and_a_late_part_counts_in_the_next_round() -> None:
    wire = Wire()
    wire.end_part(0, 1.0)
    wire.end_part(1, 2.0, weight=3.0)
    assert wire.ended(0) is None
    wire.wait(4.9)
    assert wire.ended(0) is None
    wire.wait(0.1)
    expected = (0, 1), 1, [-1.75, 1.75]  # the mean by weights
    assert wire.ended(0) == wire.ended(1) == expected
    wire.end_part(2, 10.0)  # late: it waits for the round that is open
    assert wire.ended(2) is None
    wire.end_part(1, 2.0)
    wire.wait(5.0)
    momentum = 0.5 * 1.75 + 6.0
    assert wire.ended(2) == wire.ended(1) == ((1, 2), 2, [-1.75 - momentum, 6.0])
    assert wire.ended(0) is None
    wire.end_part(2, 0.0)
    wire.end_part(1, 0.0)
    wire.end_part(0, 0.0)  # of the round before last; all are there, so nobody waits
    assert {wire.ended(rank)[:2] for rank in range(3)} == {((0, 1, 2), 3)}  # type: ignore[index]


def test_a_worker_that_stops_within_its_pushes_holds_up_no_round() -> None:
    wire = Wire()
    worker = wire.workers[2]
    pushes = worker.push(0, np.full(6, 9.0, np.float32), 1.0)
    wire.send(2, pushes[:1])
    wire.stopped.add(2)
    wire.send(2, pushes[1:])
    for _ in range(2):
        wire.end_part(0, 1.0)
        wire.end_part(1, 1.0)
        wire.wait(5.0)
        assert wire.ended(0) == wire.ended(1) is not None
    wire.stopped.clear()
    wire.send(2, worker.push(1, np.full(2, 9.0, np.float32), 1.0))
    worker.describe_part(1.0, b"", whole=False)
    wire.send(2, worker.tick())
    wire.end_part(0, 1.0)
    wire.wait(5.0)
    found = wire.ended(2)
    assert found is not None
    assert found[:2] == ((0, 2), 3)
    assert wire.ended(0) == found


def test_a_worker_that_is_awaited_ends_its_part_early() -> None:
    wire = Wire()
    wire.end_part(0, 1.0, weight=4.0)
    assert not wire.workers[2].is_awaited
    wire.end_part(1, 1.0, weight=4.0)
    assert [worker.is_awaited for worker in wire.workers] == [False, False, True]
    wire.end_part(2, 9.0, weight=2.0)
    assert (
        wire.ended(2) == wire.ended(0) == ((0, 1, 2), 1, [pytest.approx(-2.6), pytest.approx(2.6)])
    )
    assert not wire.workers[2].is_awaited


def test_a_worker_may_stop_after_its_part_is_whole() -> None:
    wire = Wire()
    wire.end_part(2, 1.0)
    wire.stopped.add(2)
    wire.end_part(0, 1.0)
    wire.wait(5.0)  # the decision of shard 0 reaches shard 1 by others
    assert wire.ended(0) == ((0, 2), 1, [-1.0, 1.0])
    wire.stopped.clear()
    wire.deliver()
    assert wire.ended(2) == ((0, 2), 1, [-1.0, 1.0])


def test_a_part_of_a_round_may_not_be_empty() -> None:
    table = TableSpec(name="mean", size=2, rule=Rule(kind=RuleKind.MEAN))
    shard = Shard(0, 2)
    for name in (b"0", b"1"):
        shard.handle(name, m.Hello(int(name), b""))
        shard.handle(name, m.Create(StoreSpec(workers=2, shards=1, tables=(table,), quorum=1)))
    shard.handle(b"0", m.Initial(0, 0, [np.zeros(2, np.float32)]))
    (outgoing,) = shard.handle(b"1", m.Push(0, 0, 0, 1.0, np.zeros(0, np.float32)))
    assert isinstance(outgoing.message, m.Fault)


def test_what_a_worker_may_not_send() -> None:
    wire = Wire()
    shard = wire.shards[1]

    def fault(message: m.ToShard) -> str:
        (outgoing,) = shard.handle(b"1", message)
        assert isinstance(outgoing.message, m.Fault)
        return outgoing.message.reason

    assert "without its push of table 'w'" in fault(PART)
    assert "with parts that have not come" in fault(m.Round(0, (0,), (1.0,), (b"",)))
    assert "round 1 of workers [0] ends" in fault(m.Round(1, (0,), (1.0,), (b"",)))
    shard = wire.shards[0]
    assert "only shard 0 may" in fault(m.Round(0, (0,), (1.0,), (b"",)))
    with pytest.raises(LocalProtocolError, match="without its weight"):
        for table in range(2):
            wire.workers[0].push(table, np.zeros(TABLES[table].size, np.float32), 1.0)
        wire.workers[0].tick()
