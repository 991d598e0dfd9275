from __future__ import annotations

import pytest

from ps_server.errors import LocalProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.norm import WorkerNorm


def part(clock: int, *sums: float) -> m.PartialNorm:
    return m.PartialNorm(clock, sums)


def test_the_total_has_the_same_bits_whichever_shard_answers_first() -> None:
    parts = {0: part(4, 1e17, 3.0), 2: part(4, 1.0, 1.0)}
    totals = []
    for order in ((0, 2), (2, 0)):
        norm = WorkerNorm(0, {0, 2}, outside=False, clock=4)
        first, second = order
        assert norm.expects_partial(first, 4)
        assert norm.add_partial(first, parts[first]) == []
        assert not norm.expects_partial(first, 4)
        sent = norm.add_partial(second, parts[second])
        assert [shard for shard, _ in sent] == [0, 2]
        totals.append(sent[0][1])
        assert norm.expects_partial(0, 5) and not norm.expects_partial(0, 4)
    assert totals[0] == totals[1] == m.TotalNorm(4, float(10**17 + 5))


def test_what_lies_outside_is_awaited_and_shard_0_passes_the_total_on() -> None:
    norm = WorkerNorm(0, {1}, outside=True, clock=0)
    assert norm.add_partial(1, part(0, 2.0)) == []
    assert norm.add_outside(0, [4.0, 1.0]) == [(0, m.TotalNorm(0, 7.0)), (1, m.TotalNorm(0, 7.0))]
    assert (norm.take_total(0), norm.take_total(0)) == (7.0, None)
    other = WorkerNorm(1, {1}, outside=True, clock=0)
    assert other.expects_total(0, 3, now=4) and other.expects_total(0, 4, now=4)
    assert not any((other.expects_total(1, 4, now=4), other.expects_total(0, 5, now=4)))
    assert not other.expects_partial(1, 0)
    other.put_total(m.TotalNorm(4, 9.0))
    assert not other.expects_total(0, 4, now=4)
    assert other.take_total(4) == 9.0


@pytest.mark.parametrize(("rank", "outside"), [(1, True), (0, False)])
def test_only_worker_0_of_a_store_with_an_outside_norm_adds(rank: int, outside: bool) -> None:
    with pytest.raises(LocalProtocolError, match="only worker 0 of a store with an outside norm"):
        WorkerNorm(rank, {0}, outside=outside, clock=0).add_outside(0, [1.0])
