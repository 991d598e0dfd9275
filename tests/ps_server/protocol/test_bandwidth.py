"""What is kept back: within the budget, in the right order, never longer than the bound allows,
and never lost.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from ps_server import Client, Consistency, SpecError, StoreSpec, TableSpec
from ps_server.protocol import messages as m
from ps_server.protocol.bandwidth import BURST_S, Budget, ChangeLog
from ps_server.protocol.messages import Addressed
from ps_server.protocol.shard import Shard
from ps_server.protocol.worker_session import Session
from tests.support.cluster import memory_store, run_workers, zeros

MEGABIT_BYTES = 125_000


def ones(size: int, value: float = 1.0) -> m.Array:
    return np.full(size, value, dtype=np.float32)


def test_a_budget_is_kept_over_any_time() -> None:
    budget = Budget(8.0, 0.0)  # a megabyte a second
    spent, now_s = 0, 0.0
    while now_s < 10:
        if budget.wait_s(now_s) == 0:
            budget.spend(30_000)
            spent += 30_000
            assert spent <= 1e6 * now_s + 1e6 * BURST_S + 30_000
        else:
            now_s += 0.001
    assert spent >= 0.99e6 * 10


def test_what_was_forced_is_paid_for_later() -> None:
    budget = Budget(8.0, 0.0)
    budget.spend(int(1e6 * BURST_S) + 2_000_000)
    assert budget.wait_s(0.0) == pytest.approx(2.0, rel=1e-3)
    assert budget.wait_s(1.5) == pytest.approx(0.5, rel=1e-3)
    assert budget.wait_s(2.1) == 0


def test_nothing_is_saved_up_beyond_the_burst() -> None:
    budget = Budget(8.0, 0.0)
    assert budget.wait_s(1_000.0) == 0
    budget.spend(int(1e6 * BURST_S))
    assert budget.wait_s(1_000.0) > 0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_a_number_above_0(rate: float) -> None:
    with pytest.raises(SpecError, match="expected a number above 0"):
        Budget(rate, 0.0)


def test_what_changes_most_relative_to_its_value_goes_first() -> None:
    log = ChangeLog(1_000.0, 0.0)
    for chunk, (value, change) in enumerate([(1.0, 0.1), (100.0, 5.0), (0.1, 0.05)]):
        log.value((0, chunk), ones(4, value))
        log.add((0, chunk), 0, ones(4, change))
    order = []
    for key in log.affordable(0.0):
        order.append(key[1])
        log.take(key)
    assert order == [2, 0, 1]  # 0.5, 0.1 and 0.05 of their values


def test_changes_are_added_up_and_the_callers_arrays_left_alone() -> None:
    log = ChangeLog(1.0, 0.0)
    first = ones(3)
    log.add((0, 0), 5, first)
    log.add((0, 0), 6, ones(3, 2.0))
    assert log.due(0, 5) == []
    assert log.due(0, 6) == [(0, 0)]
    assert log.due(1, 6) == []
    kept = log.peek((0, 0))
    assert kept is not None
    assert kept.tolist() == [3, 3, 3]
    withheld = log.take((0, 0))
    assert (withheld.first, withheld.iterations) == (5, 2)
    assert first.tolist() == [1, 1, 1]
    assert log.wait_s(0.0) is None


def test_nothing_is_put_in_order_while_nothing_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    monkeypatch.setattr(ChangeLog, "_importance", lambda _, key: compared.append(key) or 0.0)
    log = ChangeLog(1 / MEGABIT_BYTES, 0.0)  # a byte a second
    for chunk in range(3):
        log.add((0, chunk), 0, ones(3))
    log.take((0, 0))  # more than was saved up
    assert list(log.affordable(1.0)) == []
    assert compared == []
    assert next(log.affordable(100.0)) == (0, 1)
    assert compared == [(0, 1), (0, 2)]


class Job:
    """Workers and one shard, joined by hand: every message is delivered at once."""

    def __init__(
        self, workers: int, staleness: int, *, megabits_per_s: float | None, size: int = 1_000
    ) -> None:
        table = TableSpec(name="w", size=size, staleness=staleness, rows=4)
        self.store = StoreSpec(
            workers=workers, shards=1, tables=(table,), consistency=Consistency.SSP_AGGR
        )
        self.shard = Shard(0, workers)
        self.sessions = [
            Session(
                rank,
                self.store,
                log=None if megabits_per_s is None else ChangeLog(megabits_per_s, 0.0),
            )
            for rank in range(workers)
        ]
        self.values = [ones(size, 0.0) for _ in self.sessions]
        self.pushes: list[m.Push] = []
        for rank, session in enumerate(self.sessions):
            self.deliver(rank, session.start(lambda _: [ones(size, 0.0)]))

    def deliver(self, rank: int, outgoing: list[Addressed]) -> None:
        waiting = deque((rank, message) for _, message in outgoing)
        while waiting:
            sender, message = waiting.popleft()
            if isinstance(message, m.Push):
                self.pushes.append(message)
            for out in self.shard.handle(b"%d" % sender, message):
                to = int(out.peer)
                waiting.extend(
                    (to, answer) for _, answer in self.sessions[to].receive(0, out.message)
                )
        assert self.shard.counts.faults == 0

    def may_read(self, rank: int, staleness: int | None = None) -> bool:
        self.deliver(rank, self.sessions[rank].ask(0, staleness))
        if self.sessions[rank].missing(0, staleness) is not None:
            return False
        for piece in self.sessions[rank].values.take(0):
            view = self.values[rank][piece.start : piece.stop]
            np.copyto(view, piece.value)
            for change in piece.changes:
                view += change
        return True

    def iterate(self, rank: int, now_s: float) -> None:
        """Each worker counts its iterations in its own elements."""
        step = ones(self.values[rank].size, 0.0)
        step[rank :: len(self.sessions)] = 1.0
        self.values[rank] += step
        self.deliver(rank, self.sessions[rank].push(0, step, 0.0))
        session = self.sessions[rank]
        self.deliver(rank, session.changes.release(now_s, session.clock))
        self.deliver(rank, self.sessions[rank].tick())

    def counts(self, rank: int) -> list[float]:
        """What a worker knows of each worker's iterations: the least over its elements."""
        workers = len(self.sessions)
        return [float(self.values[rank][other::workers].min()) for other in range(workers)]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_in_step_nobody_waits_and_every_read_keeps_the_bound(staleness: int) -> None:
    job = Job(3, staleness, megabits_per_s=1e-6)
    for clock in range(12):
        for rank in range(3):
            assert job.may_read(rank), "a worker waits for what another keeps back"
            counts = job.counts(rank)
            assert min(counts) >= clock - staleness
            assert counts[rank] == clock
        for rank in range(3):
            job.iterate(rank, 0.0)


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_fast_worker_never_reads_beyond_the_bound_and_the_slow_one_never_waits(
    staleness: int,
) -> None:
    job = Job(2, staleness, megabits_per_s=1e-6)
    finished = [0, 0]
    for _ in range(10):
        while job.may_read(0):
            assert min(job.counts(0)) >= finished[0] - staleness
            job.iterate(0, 0.0)
            finished[0] += 1
            assert finished[0] <= finished[1] + staleness + 1
        assert job.may_read(1)
        assert min(job.counts(1)) >= finished[1] - staleness
        job.iterate(1, 0.0)
        finished[1] += 1
    assert finished[0] > 9


def total_bytes(job: Job) -> int:
    return sum(push.array.nbytes for push in job.pushes)


def test_a_small_budget_sends_less_and_all_sums_end_equal() -> None:
    ends = []
    sizes = {}
    for budget in (None, 1e-6, 1e6):
        job = Job(2, 4, megabits_per_s=budget)
        for clock in range(16):
            for rank in range(2):
                assert job.may_read(rank)
                job.iterate(rank, float(clock))
        for rank in range(2):
            job.may_read(rank, 0)
        assert all(job.may_read(rank, 0) for rank in range(2))
        ends += [job.counts(rank) for rank in range(2)]
        sizes[budget] = total_bytes(job)
    assert all(end == [16, 16] for end in ends)
    assert sizes[1e6] == sizes[None] == 2 * 16 * 4_000
    assert sizes[1e-6] <= sizes[None] / 3


def test_early_sending_makes_values_fresher_as_far_as_the_budget_goes() -> None:
    """At 2 of 4 chunks an iteration, a read sees some of the other's latest changes, and not
    all.
    """
    job = Job(2, 4, megabits_per_s=2_000 / MEGABIT_BYTES)
    fresh = []
    for clock in range(20):
        for rank in range(2):
            assert job.may_read(rank)
            job.iterate(rank, float(clock))
        job.may_read(1)
        fresh.append(float(job.values[1][0::2].mean()) - (clock + 1))
    assert -3 < np.mean(fresh[5:]) < 0


def test_a_client_sends_early_what_its_budget_allows_and_no_bound_asks_for() -> None:
    table = TableSpec(name="w", size=300, rows=5, staleness=50)
    store = StoreSpec(workers=2, shards=1, tables=(table,), consistency=Consistency.SSP_AGGR)

    def body(client: Client, rank: int) -> None:
        value = ones(300, 0.0)

        def all_has_come() -> bool | None:
            client.read(0, value)
            return True if (value == 3.0).all() else None

        client.start(zeros(store))
        client.push(0, ones(300, rank + 1))
        client.clock()
        client._monitor.wait_for(all_has_come, "not all came")

    with memory_store(2, 1, bandwidth_mbps=1e3) as connect:
        run_workers(connect, store, body)


def test_a_push_of_several_iterations_is_refused_where_gradients_are_averaged() -> None:
    store = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=2),))
    shard = Shard(0, 1)
    shard.handle(b"a", m.Hello(0, b""))
    shard.handle(b"a", m.Create(store))
    shard.handle(b"a", m.Initial(0, 0, [ones(2)]))
    (answer,) = shard.handle(b"a", m.Push(0, 0, 0, 1.0, ones(2), 2))
    assert isinstance(answer.message, m.Fault)
    assert "2 iterations" in answer.message.reason
