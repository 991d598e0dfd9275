"""Sixteen bits on the wire: half the bytes, the same bits for all, and sums that rounding does not stop."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from ps_server import Client, Consistency, Keeping, Precision, RemoteProtocolError, StoreSpec, TableSpec
from ps_server.protocol import messages as m
from ps_server.protocol.precision import Feedback, Replica, add, as_array, as_tensor, empty
from ps_server.protocol.session import Session
from ps_server.protocol.shard import Shard
from tests.support.cluster import memory_store, run_workers, zeros

SIXTEEN = [Precision.FLOAT16, Precision.BFLOAT16]
ITERATIONS = 1_000


def rounded(number: float, precision: Precision) -> float:
    return float(empty(1, precision).fill_(number))


@pytest.mark.parametrize("precision", SIXTEEN)
def test_a_long_sum_of_pushes_is_exact_where_plain_rounding_is_not(precision: Precision) -> None:
    small = 1.0002
    assert rounded(small, precision) == 1.0  # sent as it is, the rest would be lost every time
    feedback = Feedback(3, precision, reuse=True)
    total = np.zeros(3, dtype=np.float32)
    for _ in range(ITERATIONS):
        add(total, feedback.round(np.full(3, small, dtype=np.float32)))
    assert abs(total[0] - ITERATIONS) > 0.1
    np.testing.assert_allclose(total, ITERATIONS * small, atol=8e-3)


@pytest.mark.parametrize("precision", SIXTEEN)
def test_a_value_that_moves_by_less_than_its_last_digit_arrives(precision: Precision) -> None:
    step = 1e-4
    assert rounded(1 - step, precision) == 1.0  # a rounded value would never move
    value = torch.ones(5)
    replica, worker = Replica(value, precision), np.ones(5, dtype=np.float32)
    for _ in range(ITERATIONS):
        value -= step
        replica.follow(value)
        add(worker, as_array(replica.change))
        assert worker.tobytes() == replica.value.numpy().tobytes()
    np.testing.assert_allclose(worker, value.numpy(), atol=1e-6)


def test_what_float16_cannot_hold_is_sent_in_pieces() -> None:
    feedback = Feedback(1, Precision.FLOAT16, reuse=True)
    total = np.zeros(1, dtype=np.float32)
    add(total, feedback.round(np.array([150_000], dtype=np.float32)))
    assert total[0] == 65_504
    for _ in range(2):
        add(total, feedback.round(np.zeros(1, dtype=np.float32)))
    np.testing.assert_allclose(total, 150_000, rtol=1e-3)


@pytest.mark.parametrize("precision", Precision)
def test_arrays_and_tensors_share_memory(precision: Precision) -> None:
    tensor = empty(4, precision).fill_(1.5)
    array = as_array(tensor)
    assert np.shares_memory(array, as_array(as_tensor(array)))
    assert as_tensor(array).tolist() == [1.5] * 4


def test_memory_is_used_again_only_where_nobody_holds_it() -> None:
    array = np.ones(4, dtype=np.float32)
    for reuse in (True, False):
        feedback = Feedback(4, Precision.BFLOAT16, reuse=reuse)
        assert np.shares_memory(feedback.round(array), feedback.round(array)) is reuse


def store(precision: Precision, staleness: int = 0, **settings: object) -> StoreSpec:
    tables = (
        TableSpec(name="w", size=1_000, rows=3, staleness=staleness),
        TableSpec(name="mean", size=10, keeping=Keeping.AVERAGE),
    )
    return StoreSpec(workers=2, shards=2, tables=tables, precision=precision, **settings)  # type: ignore[arg-type]


def train(spec: StoreSpec, *, bind: bool) -> tuple[list[list[np.ndarray]], list[tuple[int, int]]]:
    """Two workers take small steps on "w"; the values each read at every iteration, and its bytes (out, in) of "w"."""
    read: list[list[np.ndarray]] = [[], []]
    sizes = [(0, 0), (0, 0)]
    stale = spec.tables[0].staleness

    def body(client: Client, rank: int) -> None:
        values = [np.zeros(table.size, dtype=np.float32) for table in spec.tables]
        if bind:
            client.bind(0, values[0])
        client.start(zeros(spec))
        step = np.linspace(1e-5, 1, 1_000, dtype=np.float32) * np.float32(rank + 1)
        for _ in range(10):
            for table, value in enumerate(values):
                client.read(table, value)
            read[rank].append(values[0].copy())
            client.push(0, step / -2 if stale else step, rate=1.0)
            client.push(1, np.full(10, rank + 0.1, dtype=np.float32))
            client.clock()
        for table, value in enumerate(values):
            client.read(table, value, staleness=0)
        client.barrier()
        read[rank].append(values[0].copy())
        np.testing.assert_allclose(values[1], 0.6, rtol=1e-6)  # averaged tables stay float32
        table = client.statistics().tables[0]
        sizes[rank] = (table.bytes_out, table.bytes_in)

    with memory_store(2, 2) as connect:
        run_workers(connect, spec, body)
    return read, sizes


@pytest.mark.parametrize("precision", SIXTEEN)
@pytest.mark.parametrize("consistency", Consistency)
@pytest.mark.parametrize("bind", [True, False])
def test_all_workers_hold_the_same_bits_near_the_exact_ones(
    precision: Precision, consistency: Consistency, bind: bool
) -> None:
    spec = store(precision, consistency=consistency)
    (first, second), _ = train(spec, bind=bind)
    assert [a.tobytes() for a in first] == [b.tobytes() for b in second]
    exact, _ = train(store(Precision.FLOAT32), bind=True)
    for own, true in zip(first, exact[0], strict=True):
        np.testing.assert_allclose(own, true, atol=0.02)
    assert all(not np.array_equal(a, b) for a, b in pairwise(first))


@pytest.mark.parametrize("precision", SIXTEEN)
def test_half_the_bytes(precision: Precision) -> None:
    _, exact = train(store(Precision.FLOAT32), bind=False)
    _, halved = train(store(precision), bind=False)
    heads = 40 * 6 * 12
    first_value = 4 * 1_000
    for rank in range(2):
        out, back = exact[rank], halved[rank]
        initial = first_value if rank == 0 else 0
        assert abs((back[0] - initial) - (out[0] - initial) / 2) < heads
        assert abs((back[1] - first_value) - (out[1] - first_value) / 2) < heads


def test_stale_changes_are_halved_and_end_in_the_right_sum() -> None:
    spec = store(Precision.BFLOAT16, staleness=2)
    (first, second), sizes = train(spec, bind=False)
    assert first[-1].tobytes() == second[-1].tobytes()
    exact = -10 * 1.5 * np.linspace(1e-5, 1, 1_000, dtype=np.float32)
    np.testing.assert_allclose(first[-1], exact, atol=0.01)
    _, plain = train(store(Precision.FLOAT32, staleness=2), bind=False)
    assert sizes[1][0] < 0.7 * plain[1][0]


def test_a_push_of_the_wrong_precision_is_refused() -> None:
    spec = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=2),), precision=Precision.FLOAT16)
    shard = Shard(0, 1)
    shard.handle(b"a", m.Hello(0, b""))
    shard.handle(b"a", m.Create(spec))
    shard.handle(b"a", m.Initial(0, 0, [np.zeros(2, dtype=np.float32)]))
    (answer,) = shard.handle(b"a", m.Push(0, 0, 0, 1.0, np.zeros(2, dtype=np.float32)))
    assert isinstance(answer.message, m.Fault)
    assert "as float32" in answer.message.reason


@pytest.mark.parametrize("clock", [0, 2], ids=["before the first value", "that skips one"])
def test_a_change_out_of_turn_is_refused(clock: int) -> None:
    spec = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=2),), precision=Precision.FLOAT16)
    session = Session(0, spec)
    if clock:
        first = m.Value(0, 0, 0, 0, np.zeros(2, dtype=np.float32))
        session.values.land(0, first)
        session.receive(0, first)
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        session.values.land(0, m.Value(0, 0, clock, 0, np.zeros(2, dtype=np.float16)))
