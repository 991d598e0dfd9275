"""Rounds are complete or not taken; everything out of order is refused and changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from poseidon.exchange.factors.factor_rounds import Factors, FactorSession, FactorTable, Pair
from ps_server import RemoteProtocolError
from tests.support.factor_frames import pair_of

TABLES = (
    FactorTable(name="fc6", outputs=3, inputs=2),
    FactorTable(name="fc7", outputs=2, inputs=4),
)

STALE = (FactorTable(name="fc6", outputs=3, inputs=2, staleness=2),)


def pair(value: float, table: FactorTable = TABLES[0], rows: int = 1) -> Pair:
    return pair_of(
        np.full((rows, table.outputs), value, np.float32),
        np.full((rows, table.inputs), value, np.float32),
    )


def test_a_round_is_taken_once_every_worker_has_sent_in_worker_order() -> None:
    for order in itertools.permutations(range(3)):
        session = FactorSession(1, 3, TABLES)
        for worker in order:
            assert session.take(0) is None
            if worker == 1:
                assert session.send(0, pair(1)).clock == 0
            else:
                session.receive(worker, Factors(0, 0, pair(worker)))
        taken = session.take(0)
        assert taken is not None
        assert [float(p.u[0, 0]) for p in taken.pairs] == [0, 1, 2]
        assert session.take(0) is None


def test_own_pairs_are_known_until_their_round_is_taken() -> None:
    session = FactorSession(0, 2, STALE, start_clock=5)
    session.send(0, pair(1))
    session.send(0, pair(2))
    assert [clock for clock, _ in session.own(0)] == [5, 6]
    assert session.lagging(0) == [1]
    session.receive(1, Factors(0, 5, pair(3)))
    assert session.is_ready(0)
    session.take(0)
    assert [clock for clock, _ in session.own(0)] == [6]


def test_what_is_not_the_next_pair_is_refused() -> None:
    session = FactorSession(0, 2, TABLES)
    with pytest.raises(RemoteProtocolError, match="expected 0"):
        session.receive(1, Factors(0, 1, pair(1)))
    session.send(0, pair(1))
    session.receive(1, Factors(0, 0, pair(1)))
    assert session.is_ready(0)


@pytest.mark.parametrize(("tables", "ahead"), [(TABLES, 1), (STALE, 3)])
def test_nobody_may_be_further_ahead_than_the_bound_lets_him(
    tables: tuple[FactorTable, ...], ahead: int
) -> None:
    session = FactorSession(0, 2, tables)
    for clock in range(ahead):
        session.receive(1, Factors(0, clock, pair(1)))
    with pytest.raises(RemoteProtocolError, match="too far ahead"):
        session.receive(1, Factors(0, ahead, pair(1)))
    session.send(0, pair(1))
    session.receive(1, Factors(0, ahead, pair(1)))
