"""A worker's session on a hand-fed wire: the bound, read-my-writes, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from ps_server.errors import LocalProtocolError, PeerLost, RemoteProtocolError, SpecError
from ps_server.protocol import messages as m
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.protocol.settings import Consistency, StoreSpec, TableSpec
from ps_server.protocol.worker_session import Session


def session(staleness: int = 0, rank: int = 0, shards: int = 1, **settings: object) -> Session:
    tables = (TableSpec(name="w", size=2, staleness=staleness),)
    return Session(rank, StoreSpec(workers=2, shards=shards, tables=tables, **settings))  # type: ignore[arg-type]


def array(*values: float) -> m.Array:
    return np.array(values, dtype=np.float32)


def read(s: Session) -> list[float]:
    out = np.full(2, np.nan, dtype=np.float32)
    for piece in s.values.take(0):
        out[piece.start : piece.stop] = piece.value
        for change in piece.changes:
            out[piece.start : piece.stop] += change
    return [float(x) for x in out]


def test_a_table_is_read_only_when_its_clock_has_come() -> None:
    s = session()
    assert s.missing(0) is not None
    s.receive(0, m.Value(0, 0, 0, 0, array(1, 2)))
    assert s.missing(0) is None
    assert read(s) == [1, 2]
    s.push(0, array(1, 1), 0.1)
    s.tick()
    assert s.missing(0) is not None
    s.receive(0, m.Value(0, 0, 1, 1, array(3, 4)))
    assert s.missing(0) is None


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_fast_worker_blocks_after_exactly_s_plus_1_iterations(staleness: int) -> None:
    s = session(staleness)
    s.receive(0, m.Value(0, 0, 0, 0, array(0, 0)))
    finished = 0
    while s.missing(0) is None:
        s.push(0, array(1, 1), 0.0)
        s.tick()
        finished += 1
    assert finished == staleness + 1
    s.receive(0, m.Fresh(1))
    assert s.missing(0) is None
    assert s.missing(0, staleness=0) is not None  # a strict read waits for everyone


def test_own_changes_that_the_shard_had_not_yet_are_added_again() -> None:
    s = session(staleness=3)
    s.receive(0, m.Value(0, 0, 0, 0, array(0, 0)))
    for change in (1.0, 10.0, 100.0):
        s.push(0, array(change, change), 0.0)
        s.tick()
    # holds 1 and 10 of ours, and 5000 of the other
    s.receive(0, m.Value(0, 0, 1, 2, array(5011, 5011)))
    assert read(s) == [5111, 5111]
    s.receive(0, m.Value(0, 0, 3, 3, array(6111, 6111)))
    assert read(s) == [6111, 6111]


def test_own_pushes_are_not_held_after_the_shard_is_known_to_have_them() -> None:
    """A lone worker gets no values back: nobody else changes the chunk."""
    s = session(staleness=1)
    s.receive(0, m.Value(0, 0, 0, 0, array(0, 0)))
    assert read(s) == [0, 0]
    for clock in range(1, 20):
        s.push(0, array(1, 1), 0.0)
        s.tick()
        s.receive(0, m.Fresh(clock))
        assert len(s.values.copies[0][0].held) == 0
    s.receive(0, m.Value(0, 0, 19, 19, array(26, 26)))
    assert read(s) == [26, 26]


def test_fresh_lets_go_of_no_push_that_an_unread_value_lacks() -> None:
    s = session(staleness=3)
    s.receive(0, m.Value(0, 0, 0, 0, array(5, 5)))
    for _ in range(2):
        s.push(0, array(1, 1), 0.0)
        s.tick()
    s.receive(0, m.Fresh(2))
    assert read(s) == [7, 7]


def test_pulled_values_are_asked_for_once() -> None:
    s = session(consistency=Consistency.SSP)
    assert s.ask(0) == []  # the first value comes unasked
    s.receive(0, m.Value(0, 0, 0, 0, array(0, 0)))
    s.push(0, array(1, 1), 0.1)
    s.tick()
    assert [a.message for a in s.ask(0)] == [m.Get(0, 0, 1)]
    assert s.ask(0) == []


def test_norms_are_summed_in_table_order_whoever_is_first() -> None:
    tables = tuple(TableSpec(name=str(i), size=2) for i in range(2))
    s = Session(0, StoreSpec(workers=1, shards=2, tables=tables, clip=1.0))
    assert s.receive(1, m.PartialNorm(0, (2.0,))) == []
    answers = s.receive(0, m.PartialNorm(0, (1.0,)))
    assert answers == [(0, m.TotalNorm(0, 3.0)), (1, m.TotalNorm(0, 3.0))]


def test_a_signal_is_heard_once_though_every_shard_passes_it_on() -> None:
    s = session(rank=1, shards=2)
    for shard in range(2):
        s.receive(shard, m.Signal(m.SignalKind.STOP, 9))
    assert s.signals.all == [m.Signal(m.SignalKind.STOP, 9)]


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_signal_names_an_iteration_that_nobody_has_passed(staleness: int) -> None:
    """Nor will, before it hears: rank 0 may have pushed, and not yet ended, the iteration in
    which it signals.
    """
    s, other = session(staleness), session(staleness, rank=1)
    s.push(0, array(1, 1), 0.0)
    signal, outgoing = s.signal(m.SignalKind.SNAPSHOT)
    assert [a.message for a in outgoing] == [signal]
    for clock in (0, 1):  # the second value has rank 0's push, and goes before the signal
        other.receive(0, m.Value(0, 0, clock, other.clock, array(0, 0)))
        while other.missing(0) is None:
            other.push(0, array(1, 1), 0.0)
            other.tick()
    assert signal.clock == other.clock + 1 == staleness + 3


LOCAL_FAULTS = {
    "two pushes": lambda s: [s.push(0, array(1, 1), 0.1), s.push(0, array(1, 1), 0.1)],
    "no push": lambda s: s.tick(),
    "other size": lambda s: s.push(0, array(1), 0.1),
    "other type": lambda s: s.push(0, np.zeros(2), 0.1),
    "too many initial arrays": lambda s: s.start(lambda table: [array(1, 1)] * 5),
}


@pytest.mark.parametrize("call", LOCAL_FAULTS.values(), ids=LOCAL_FAULTS.keys())
def test_breaking_the_contract_is_the_callers_error(call: object) -> None:
    with pytest.raises(LocalProtocolError):
        call(session())  # type: ignore[operator]


def test_a_signal_allows_for_the_staleness_of_row_tables() -> None:
    """A worker may be so far ahead of the others where all that it reads are row tables."""
    s = Session(0, StoreSpec(workers=2, shards=1, tables=()))
    for staleness in (3, 1):
        s.rows.create(RowTableSpec(name="users", rows=5, dim=2, staleness=staleness))
    signal, _ = s.signal(m.SignalKind.STOP)
    assert signal.clock == 3 + 3


def test_only_rank_0_signals() -> None:
    with pytest.raises(LocalProtocolError, match="only worker 0"):
        session(rank=1).signal(m.SignalKind.STOP)


def test_a_rank_beyond_the_store_is_an_error() -> None:
    with pytest.raises(SpecError, match="rank is 2"):
        session(rank=2)


def test_a_worker_that_left_early_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match="worker 1 has left after 7 iterations"):
        session().receive(0, m.Gone(1, 7))


REMOTE_FAULTS = [
    m.Fault("no"),
    m.Value(0, 0, 0, 0, array(1)),
    m.Value(0, 0, 1, 1, array(1, 1)),
    m.Value(0, 5, 0, 0, array(1, 1)),
    m.Value(5, 0, 0, 0, array(1, 1)),
    m.Welcome(3),
    m.Gathered(0, (b"",)),
    m.Gathered(0, (b"", b"")),
    m.Clock(1),
    m.PartialNorm(1, (1.0,)),
    m.TotalNorm(0, 1.0),
    m.History(0, 0, 0, 0, array(1, 1)),
    m.Signal(m.SignalKind.STOP, 9),
    m.Gone(0, 7),
    m.Gone(2, 7),
]


@pytest.mark.parametrize("message", REMOTE_FAULTS, ids=str)
def test_what_a_shard_may_not_say(message: m.Message) -> None:
    with pytest.raises(RemoteProtocolError):
        session().receive(0, message)


def test_nothing_is_kept_that_was_not_asked_for_or_has_been_heard() -> None:
    said: list[tuple[Session, m.Message]] = [
        (session(), m.PartialNorm(0, (1.0,))),
        (session(rank=1, outside_norm=(0,), clip=1.0), m.TotalNorm(0, 1.0)),
        (session(), m.Gathered(0, (b"", b""))),
    ]
    said[2][0].gather(b"")
    for asking, message in said:
        asking.receive(0, message)
        with pytest.raises(RemoteProtocolError, match="unexpected"):
            asking.receive(0, message)


def test_a_worker_that_is_not_rank_0_is_told_no_part_of_a_norm() -> None:
    with pytest.raises(RemoteProtocolError, match="unexpected PartialNorm"):
        session(rank=1).receive(0, m.PartialNorm(0, (1.0,)))


def test_a_shards_leave_is_the_answer_to_this_workers() -> None:
    s = session(shards=2)
    s.start(lambda table: [array(0, 0)])
    with pytest.raises(RemoteProtocolError, match="unexpected Leave"):
        s.receive(0, m.Leave())
    s.leave()
    assert s.stays_on == {0, 1}
    s.receive(0, m.Leave())
    assert s.stays_on == {1}


def test_tables_with_clocks_of_their_own_are_pushed_one_by_one() -> None:
    tables = (TableSpec(name="v", size=2), TableSpec(name="w", size=2))
    s = Session(0, StoreSpec(workers=2, shards=1, tables=tables), table_clocks=True)
    for table in (0, 1):
        s.receive(0, m.Value(table, 0, 0, 0, array(1, 2)))
    for clock in range(3):
        (sent,) = s.push(1, array(1, 1), 0.1)
        assert isinstance(sent.message, m.Push)
        assert sent.message.clock == clock
        s.tick()
        assert s.missing(0) is None
        assert s.missing(1) is not None
        with pytest.raises(
            LocalProtocolError, match=f"'w' was already pushed in iteration {clock + 1}"
        ):
            s.push(1, array(1, 1), 0.1)
        s.receive(0, m.Value(1, 0, clock + 1, clock + 1, array(3, 4)))
        assert s.missing(1) is None
    assert s.clock == 3


@pytest.mark.parametrize(("staleness", "settings"), [(1, {}), (0, {"clip": 1.0})])
def test_clocks_of_tables_exclude_what_needs_one_clock(
    staleness: int, settings: dict[str, float]
) -> None:
    tables = (TableSpec(name="w", size=2, staleness=staleness),)
    with pytest.raises(SpecError, match="have staleness 0 and no limit"):
        Session(0, StoreSpec(workers=2, shards=1, tables=tables, **settings), table_clocks=True)  # type: ignore[arg-type]


def test_numbers_of_collections_go_on_in_the_next_session() -> None:
    first = session()
    assert [first.gather(b"")[0], first.renewed(3).gather(b"")[0]] == [0, 1]
