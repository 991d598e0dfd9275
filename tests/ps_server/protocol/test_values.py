"""The values of all tables on one worker: arrays of their reader, and histories."""

from __future__ import annotations

import numpy as np
import pytest

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.settings import StoreSpec, TableSpec
from ps_server.protocol.worker_session import Session
from tests.ps_server.protocol.test_worker_session import array, session


def test_values_land_where_a_table_is_bound() -> None:
    s = session()
    out = np.zeros(2, dtype=np.float32)
    s.values.bind(0, out)
    first = m.Value(0, 0, 0, 0, array(1, 2))
    s.values.land(0, first)
    assert s.missing(0) is not None  # nobody may look before it was received
    s.receive(0, first)
    assert out.tolist() == [1, 2]
    assert s.values.take(0) == []
    s.push(0, array(1, 1), 0.1)
    s.tick()
    # a repetition of what the reader has: may be in use
    s.values.land(0, m.Value(0, 0, 0, 0, array(9, 9)))
    assert out.tolist() == [1, 2]
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        s.values.land(0, m.Value(0, 0, 2, 2, array(9, 9)))
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        s.values.land(0, m.Value(0, 0, 1, 1, array(9)))
    assert out.tolist() == [1, 2]
    s.values.land(0, m.Value(0, 0, 1, 1, array(3, 4)))
    assert out.tolist() == [3, 4]


def test_only_tables_of_staleness_0_are_bound_and_only_at_first() -> None:
    out = np.zeros(2, dtype=np.float32)
    with pytest.raises(LocalProtocolError, match="cannot be bound"):
        session(staleness=1).values.bind(0, out)
    with pytest.raises(LocalProtocolError, match="takes 2 flat float32"):
        session().values.bind(0, np.zeros(3, dtype=np.float32))
    s = session()
    s.receive(0, m.Value(0, 0, 0, 0, array(1, 2)))
    with pytest.raises(LocalProtocolError, match="before their first value"):
        s.values.bind(0, out)


def test_history_is_put_together_from_its_chunks() -> None:
    tables = (TableSpec(name="w", size=4, rows=2),)
    s = Session(0, StoreSpec(workers=1, shards=2, tables=tables))
    for chunk in range(2):
        s.receive(chunk, m.Value(0, chunk, 0, 0, array(0, 0)))
    own = [np.zeros(4, np.float32)]
    (asked, outgoing), (later, _) = s.ask_history(0, own), s.ask_history(0)
    for addressed in outgoing:
        assert asked.arrays is None
        message = addressed.message
        assert isinstance(message, m.GetHistory)
        for number in range(2):
            piece = m.History(0, message.chunk, 0, number, array(message.chunk + number))
            s.receive(addressed.shard, piece)
    assert asked.arrays is own
    assert own[0].tolist() == [0, 1, 1, 2]
    assert later.arrays is None


@pytest.mark.parametrize(
    "piece",
    [
        m.History(0, 0, 1, 0, array(1, 1)),
        m.History(0, 0, 0, 1, array(1)),
        m.History(0, 0, 0, 0, array()),
        m.History(0, 0, 0, 0, array(1, 1, 1)),
        m.History(0, 2, 0, 0, array(1, 1)),
        m.History(0, 1, 0, 0, array(1, 1)),
    ],
    ids=["clock", "gap", "empty", "too long", "no chunk", "of another shard"],
)
def test_a_piece_of_a_history_is_the_next_one(piece: m.History) -> None:
    tables = (TableSpec(name="w", size=4, rows=2),)
    s = Session(0, StoreSpec(workers=1, shards=2, tables=tables))
    s.receive(0, m.Value(0, 0, 0, 0, array(0, 0)))
    asked, _ = s.ask_history(0)
    with pytest.raises(RemoteProtocolError, match=r"history|does not have"):
        s.receive(0, piece)
    assert asked.arrays is None
