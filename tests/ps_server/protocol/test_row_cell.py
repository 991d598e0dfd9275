"""Row tables of a shard as a state machine: what it answers, and that nothing illegal changes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol import row_cell
from ps_server.protocol.row_cell import MAX_WAITING, Answer, ShardRows
from ps_server.protocol.row_settings import RowInit, RowRule, RowRuleKind, RowTableSpec
from ps_server.protocol.settings import StoreSpec
from ps_server.protocol.shard import Shard
from ps_server.row_rules import first_values

SPEC = RowTableSpec(name="users", rows=10, dim=2, init=RowInit.NORMAL, seed=4)


def ids(*rows: int) -> m.RowIds:
    return np.array(rows, np.uint32)


def gradient(*rows: Sequence[float]) -> m.Array:
    return np.array(rows, np.float32).reshape(-1)


def send(shard: ShardRows, rank: int, message: m.Message) -> list[Answer]:
    return list(shard.handlers[type(message)](rank, message))


def made(workers: int = 2, spec: RowTableSpec = SPEC, shards: int = 2) -> ShardRows:
    """Shard 1, on which all workers have created the table."""
    shard = ShardRows(1, workers)
    for rank in range(workers):
        assert send(shard, rank, m.CreateRows(0, shards, spec)) == []
    return shard


def values(shard: ShardRows, clock: int, *rows: int) -> m.Array:
    ((_, answer),) = send(shard, 0, m.GetRows(0, 0, clock, ids(*rows)))
    assert isinstance(answer, m.Rows)
    return answer.array.reshape(-1, 2)


def test_a_row_has_its_first_value_until_it_has_a_gradient() -> None:
    shard = made()
    first = first_values(SPEC.init, SPEC.scale, SPEC.seed, ids(1, 3, 5), 2)
    assert values(shard, 0, 1, 3, 5).tobytes() == first.tobytes()
    send(shard, 0, m.PushRows(0, 0, 0.5, ids(3), gradient([2, 4])))
    send(shard, 1, m.PushRows(0, 0, 0.5, ids(3, 5), gradient([0, 4], [8, 0])))
    expected = first - np.array([[0, 0], [0.5, 2], [2, 0]], np.float32)
    assert values(shard, 1, 1, 3, 5).tobytes() == expected.tobytes()


def test_a_request_waits_for_the_pushes_of_all_workers() -> None:
    shard = made()
    assert send(shard, 1, m.GetRows(0, 6, 1, ids(1))) == []
    assert send(shard, 0, m.GetRows(0, 7, 1, ids())) == []
    assert send(shard, 1, m.PushRows(0, 0, 1.0, ids(), gradient())) == []
    answers = send(shard, 0, m.PushRows(0, 0, 1.0, ids(), gradient()))
    assert [(rank, a.number) for rank, a in answers if isinstance(a, m.Rows)] == [(1, 6), (0, 7)]


def test_a_request_waits_until_worker_0_has_created_the_table() -> None:
    shard = ShardRows(1, 2)
    assert send(shard, 1, m.CreateRows(0, 2, SPEC)) == []
    assert send(shard, 1, m.GetRows(0, 6, 0, ids(1))) == []
    answers = send(shard, 0, m.CreateRows(0, 2, SPEC))
    assert [(rank, a.number) for rank, a in answers if isinstance(a, m.Rows)] == [(1, 6)]


@pytest.mark.parametrize("kind", RowRuleKind)
def test_bits_do_not_depend_on_who_comes_first(kind: RowRuleKind) -> None:
    spec = RowTableSpec(name="users", rows=10, dim=2, rule=RowRule(kind=kind))
    pushes = [
        m.PushRows(0, 0, 0.1, ids(1, 3), gradient([1e8, 1], [1, 1])),
        m.PushRows(0, 0, 0.1, ids(3, 7), gradient([3, 1], [-1, 1])),
        m.PushRows(0, 0, 0.1, ids(1, 3, 7), gradient([-1e8, 1], [0.3, 7], [5, 5])),
    ]
    found = set()
    for order in permutations(range(3)):
        shard = made(3, spec)
        for rank in order:
            send(shard, rank, pushes[rank])
        found.add(values(shard, 1, 1, 3, 5, 7).tobytes())
    assert len(found) == 1


def test_at_staleness_s_a_worker_may_be_s_pushes_ahead() -> None:
    spec = RowTableSpec(name="users", rows=10, dim=2, staleness=1)
    shard = made(spec=spec)
    for clock in (0, 1):
        send(shard, 0, m.PushRows(0, clock, 1.0, ids(1), gradient([2, 2])))
    with pytest.raises(RemoteProtocolError, match="pushes iteration 2 of row table 'users', which"):
        send(shard, 0, m.PushRows(0, 2, 1.0, ids(1), gradient([2, 2])))
    for clock in (0, 1):
        send(shard, 1, m.PushRows(0, clock, 1.0, ids(1), gradient([2, 2])))
    assert values(shard, 2, 1).tolist() == [[-4, -4]]


def test_changed_rows_are_read_and_restored_to_the_bit() -> None:
    spec = RowTableSpec(name="users", rows=10, dim=2, rule=RowRule(kind=RowRuleKind.ADAM))
    shard, other = made(spec=spec), made(spec=spec)
    for clock, rows in enumerate([ids(9), ids(3, 5), ids(5, 9)]):
        for rank in range(2):
            given = np.arange(2 * len(rows), dtype=np.float32) + rank
            send(shard, rank, m.PushRows(0, clock, 0.1, rows, given.copy()))
    pieces = [send(shard, 0, m.ReadRows(0, first, 2))[0][1] for first in (0, 2, 4)]
    assert [list(p.rows) for p in pieces if isinstance(p, m.KeptRows)] == [[3, 9], [5], []]
    for piece in pieces:
        send(other, 0, piece)
    for each in (shard, other):
        for rank in range(2):
            send(each, rank, m.PushRows(0, 3, 0.1, ids(3, 9), gradient([1, 2], [3, 4])))
    assert values(shard, 4, 1, 3, 5, 9).tobytes() == values(other, 4, 1, 3, 5, 9).tobytes()


ILLEGAL: dict[str, tuple[int, m.Message, str]] = {
    "row of another shard": (0, m.PushRows(0, 0, 1.0, ids(2), gradient([1, 1])), "does not have"),
    "row beyond the last": (0, m.GetRows(0, 0, 0, ids(11)), "does not have"),
    "too few elements": (0, m.PushRows(0, 0, 1.0, ids(1, 3), gradient([1, 1])), "expected \\[2\\]"),
    "a later iteration": (0, m.PushRows(0, 1, 1.0, ids(), gradient()), "expected 0"),
    "another rate": (1, m.PushRows(0, 0, 2.0, ids(), gradient()), "the others have 1.0"),
    "no such table": (0, m.GetRows(1, 0, 0, ids()), "no row table 1"),
    "another description": (
        1,
        m.CreateRows(0, 2, RowTableSpec(name="users", rows=10, dim=3)),
        "describes row table 0",
    ),
    "a gap": (0, m.CreateRows(2, 2, SPEC), "has 1 row tables"),
    "fewer shards": (0, m.CreateRows(1, 1, SPEC), "of 1 shards on shard 1"),
    "rows set by another": (1, m.KeptRows(0, 5, ids(1), [gradient([1, 1])]), "only worker 0 may"),
    "rows set late": (0, m.KeptRows(0, 5, ids(1), [gradient([1, 1])]), "before the first push"),
    "no history": (0, m.KeptRows(0, 5, ids(1), []), "expected \\[2\\] a row"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_is_illegal_changes_nothing(case: str) -> None:
    rank, message, reason = ILLEGAL[case]
    shard, plain = made(), made()
    first = ["another rate", "rows set by another", "rows set late"]
    pushes = [m.PushRows(0, 0, 1.0, ids(1), gradient([2, 6])) for _ in range(2)]
    for each in (shard, plain) if case in first else ():
        send(each, 0, pushes[0])
    with pytest.raises(RemoteProtocolError, match=reason):
        send(shard, rank, message)
    for each in (shard, plain):
        for worker in (1,) if case in first else (0, 1):
            send(each, worker, pushes[worker])
    assert values(shard, 1, 1, 3).tobytes() == values(plain, 1, 1, 3).tobytes()


def test_requests_that_wait_are_few() -> None:
    shard = made()
    for number in range(MAX_WAITING):
        send(shard, 0, m.GetRows(0, number, 1, ids()))
    with pytest.raises(RemoteProtocolError, match="already waits for"):
        send(shard, 0, m.GetRows(0, MAX_WAITING, 1, ids()))


def test_a_worker_that_has_left_is_missed() -> None:
    store = StoreSpec(workers=2, shards=1, tables=())
    shard = Shard(0, 2)
    for rank, peer in enumerate((b"a", b"b")):
        shard.handle(peer, m.Hello(rank, b""))
        shard.handle(peer, m.Create(store))
        shard.handle(peer, m.CreateRows(0, 1, SPEC))
    shard.handle(b"b", m.Leave())
    (out,) = shard.handle(b"a", m.PushRows(0, 0, 1.0, ids(), gradient()))
    assert out.peer == b"a"
    assert isinstance(out.message, m.Gone)
    assert shard.memory_bytes > 0


def test_a_table_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(row_cell, "RowCell", no_memory)
    with pytest.raises(RemoteProtocolError, match="shard 1 has no memory for the row table"):
        made()
