"""Row tables of a worker as a state machine: what it sends, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.row_settings import RowRule, RowRuleKind, RowTableSpec
from ps_server.protocol.worker_rows import WorkerRows

SPEC = RowTableSpec(
    name="users", rows=10, dim=2, staleness=1, rule=RowRule(kind=RowRuleKind.ROW_WISE_ADAGRAD)
)


def ids(*rows: int) -> m.RowIds:
    return np.array(rows, np.uint32)


def array(*shape: int) -> m.Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def made() -> WorkerRows:
    rows = WorkerRows(2)
    assert rows.create(SPEC) == (0, [(shard, m.CreateRows(0, 2, SPEC)) for shard in (0, 1)])
    return rows


def test_requests_and_pushes_are_cut_by_shard_and_put_together() -> None:
    rows = made()
    number, sent = rows.request(0, ids(1, 4, 5))
    requests = [(shard, x.clock, x.rows.tolist()) for shard, x in sent if isinstance(x, m.GetRows)]
    assert requests == [(0, 0, [4]), (1, 0, [1, 5])]
    rows.receive_rows(1, m.Rows(0, number, array(4)))
    assert rows.take(number) is None
    rows.receive_rows(0, m.Rows(0, number, array(2) + 10))
    values = rows.take(number)
    assert values is not None
    assert values.tolist() == [[0, 1], [10, 11], [2, 3]]
    pushes = [(s, p.rows.tolist(), p.array.tolist(), p.clock) for s, p in _pushes(rows, 4, 6, 9)]
    assert pushes == [(0, [4, 6], [0, 1, 2, 3], 0), (1, [9], [4, 5], 0)]
    assert rows.clock(0) == 1


def _pushes(rows: WorkerRows, *named: int) -> list[tuple[int, m.PushRows]]:
    sent = rows.push(0, ids(*named), array(len(named), 2), 0.5)
    return [(shard, message) for shard, message in sent if isinstance(message, m.PushRows)]


def test_requests_need_the_clock_that_staleness_asks_for() -> None:
    rows = made()
    rows.restart(0, 7)
    for ahead, staleness, clock in [(0, None, 6), (1, None, 7), (0, 0, 7), (1, 0, 8)]:
        _, sent = rows.request(0, ids(), ahead=ahead, staleness=staleness)
        assert {x.clock for _, x in sent if isinstance(x, m.GetRows)} == {clock}


def test_a_request_that_is_forgotten_leaves_nothing() -> None:
    rows = made()
    number, _ = rows.request(0, ids(2))
    rows.receive_rows(0, m.Rows(0, number, array(2)))
    rows.forget(number)
    rows.receive_rows(1, m.Rows(0, number, array(0)))
    with pytest.raises(RemoteProtocolError, match="not requested"):
        rows.receive_rows(1, m.Rows(0, number, array(0)))


MISUSES: dict[str, tuple[Callable[[WorkerRows], object], str]] = {
    "push without request": (lambda r: r.push(0, ids(), array(0, 2), 1.0), "were requested"),
    "order": (lambda r: r.request(0, ids(3, 2)), "increasing order"),
    "twice": (lambda r: r.request(0, ids(3, 3)), "increasing order"),
    "type": (lambda r: r.request(0, np.array([1])), "flat uint32"),  # type: ignore[arg-type]
    "range": (lambda r: r.request(0, ids(10)), "no row 10; expected 0 to 9"),
    "shape": (lambda r: r.push(0, ids(1), array(1, 3), 1.0), "shapes \\[\\(1, 2\\)\\]"),
    "history": (lambda r: r.restore(0, 1, ids(1), [array(1, 2)]), "\\(1, 1\\)"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_refused(case: str) -> None:
    misuse, reason = MISUSES[case]
    with pytest.raises(LocalProtocolError, match=reason):
        misuse(made())


ILLEGAL: dict[str, tuple[int, m.Rows | m.KeptRows, str]] = {
    "number": (0, m.Rows(0, 5, array(2)), "not requested"),
    "table": (0, m.Rows(1, 0, array(2)), "not requested"),
    "size": (0, m.Rows(0, 0, array(3)), "3 elements for 1 rows of 2"),
    "unasked": (0, m.KeptRows(0, 1, ids(2), [array(2), array(1)]), "not asked for"),
    "no table": (1, m.KeptRows(3, 1, ids(2), [array(2), array(1)]), "not asked for"),
    "no history": (1, m.KeptRows(0, 1, ids(3), [array(2)]), "do not fit table 'users'"),
    "no row": (1, m.KeptRows(0, 1, ids(11), [array(2), array(1)]), "do not fit table 'users'"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_answers_that_do_not_fit_are_refused(case: str) -> None:
    shard, message, reason = ILLEGAL[case]
    rows = made()
    number, _ = rows.request(0, ids(2, 3))
    rows.read(0, 1, 0, 100)
    with pytest.raises(RemoteProtocolError, match=reason):
        if isinstance(message, m.Rows):
            rows.receive_rows(shard, message)
        else:
            rows.receive_kept(shard, message)
    rows.receive_rows(0, m.Rows(0, number, array(2)))
    rows.receive_rows(1, m.Rows(0, number, array(2)))
    assert rows.take(number) is not None
    rows.receive_kept(1, m.KeptRows(0, 1, ids(3), [array(2), array(1)]))
    assert rows.take_kept(0, 0) is None
    assert rows.take_kept(0, 1) is not None
    assert rows.take_kept(0, 1) is None
