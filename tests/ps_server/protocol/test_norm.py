from __future__ import annotations

import pytest

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.norm import OutsideNorms, WorkerNorm
from ps_server.protocol.seats import Seat


def part(clock: int, *sums: float) -> m.PartialNorm:
    return m.PartialNorm(clock, sums)


def test_the_total_has_the_same_bits_whichever_shard_answers_first() -> None:
    parts = {0: part(4, 1e17, 3.0), 2: part(4, 1.0, 1.0)}
    totals = []
    for order in ((0, 2), (2, 0)):
        norm = WorkerNorm(Seat(), {0, 2}, outside=(), clock=4)
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
    norm = WorkerNorm(Seat(), {1}, outside=(0,), clock=0)
    assert norm.add_partial(1, part(0, 2.0)) == []
    assert norm.add_outside(0, [4.0, 1.0]) == [(0, m.TotalNorm(0, 7.0)), (1, m.TotalNorm(0, 7.0))]
    assert (norm.total(0), norm.total(0), norm.total(1)) == (7.0, 7.0, None)
    other = WorkerNorm(Seat(host=1, rank=1), {1}, outside=(0,), clock=0)
    assert other.expects_total(0, 3, now=4) and other.expects_total(0, 4, now=4)
    assert not any((other.expects_total(1, 4, now=4), other.expects_total(0, 5, now=4)))
    assert not other.expects_partial(1, 0)
    other.put_total(m.TotalNorm(4, 9.0))
    assert not other.expects_total(0, 4, now=4)
    assert other.total(4) == 9.0
    other.put_total(m.TotalNorm(6, 8.0))
    assert (other.total(4), other.total(6)) == (None, 8.0)


def test_rank_0_awaits_the_part_of_each_plane_with_gradients_outside() -> None:
    norm, other = (
        WorkerNorm(Seat(local_rank=rank, rank=rank), {1}, outside=(0, 1), clock=0)
        for rank in range(2)
    )
    ((shard, part_1),) = other.add_outside(0, [3.0, 1.0])
    assert isinstance(part_1, m.OutsideNorm)
    assert (shard, part_1) == (0, m.OutsideNorm(1, 0, (3.0, 1.0)))
    assert norm.expects_outside(0, part_1)
    assert not norm.expects_outside(1, part_1)
    assert not other.expects_outside(0, part_1)
    assert not norm.expects_outside(0, m.OutsideNorm(1, 1, ()))
    assert not any(norm.expects_outside(0, m.OutsideNorm(plane, 0, ())) for plane in (0, 2))
    assert norm.put_outside(part_1) == []
    assert not norm.expects_outside(0, part_1)
    assert norm.add_outside(0, [0.5]) == []
    sent = norm.add_partial(1, part(0, 2.0))
    assert sent == [(0, m.TotalNorm(0, 6.5)), (1, m.TotalNorm(0, 6.5))]
    assert norm.expects_outside(0, m.OutsideNorm(1, 1, ()))


@pytest.mark.parametrize(
    ("seat", "outside"), [((0, 0), ()), ((0, 1), (0,)), ((1, 0), (0,))], ids=str
)
def test_only_workers_of_host_0_add_for_planes_with_an_outside_norm(
    seat: tuple[int, int], outside: tuple[int, ...]
) -> None:
    norm = WorkerNorm(Seat(*seat, rank=sum(seat)), {0}, outside=outside, clock=0)
    with pytest.raises(LocalProtocolError, match="only workers of host 0 may, in the planes"):
        norm.add_outside(0, [1.0])


def test_shard_0_passes_on_one_part_of_a_plane_in_an_iteration() -> None:
    norms = OutsideNorms((0, 1, 2), 5)
    for plane in (1, 2):
        norms.add(m.OutsideNorm(plane, 5, ()))
    for wrong in (m.OutsideNorm(1, 5, ()), m.OutsideNorm(1, 6, ()), m.OutsideNorm(3, 5, ())):
        with pytest.raises(RemoteProtocolError, match="once in iteration 5"):
            norms.add(wrong)
    with pytest.raises(RemoteProtocolError, match="expected iteration 5"):
        norms.end(6)
    norms.end(5)
    norms.add(m.OutsideNorm(1, 6, ()))
