"""Sixteen bits on the wire: half the bytes, the same bits for all, and sums that rounding does
not stop.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from ps_server import (
    Client,
    CodecPair,
    Consistency,
    Keeping,
    Precision,
    RemoteProtocolError,
    Rule,
    RuleKind,
    SpecError,
    StoreSpec,
    TableSpec,
)
from ps_server.codecs.base import SEGMENT_ELEMENTS
from ps_server.codecs.registry import codec_of
from ps_server.protocol import messages as m
from ps_server.protocol.placement import Chunk, place
from ps_server.protocol.precision import (
    EncodedReplica,
    Feedback,
    WorkersCopy,
    add,
    as_array,
    as_tensor,
    empty,
    key_of,
)
from ps_server.protocol.shard import Shard
from ps_server.protocol.worker_session import Session
from tests.support.cluster import memory_store, run_workers, zeros
from tests.support.sampling import sample, sample_of_pairs

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
    replica, worker = WorkersCopy(value, precision), np.ones(5, dtype=np.float32)
    for _ in range(ITERATIONS):
        value -= step
        replica.follow(value, 0)
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
    """Two workers take small steps on "w"; the values each read at every iteration, and its
    bytes (out, in) of "w".
    """
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


@pytest.mark.parametrize(
    ("precision", "consistency", "bind"), sample_of_pairs(SIXTEEN, list(Consistency), [True, False])
)
def test_all_workers_hold_the_same_bits_near_the_exact_ones(
    precision: Precision, consistency: Consistency, bind: bool
) -> None:
    (first, second), sizes = train(store(precision, consistency=consistency), bind=bind)
    assert [a.tobytes() for a in first] == [b.tobytes() for b in second]
    (exact, _), whole = train(store(Precision.FLOAT32, consistency=consistency), bind=bind)
    for own, true in zip(first, exact, strict=True):
        np.testing.assert_allclose(own, true, atol=0.02)
    assert all(not np.array_equal(a, b) for a, b in pairwise(first))
    if consistency is not Consistency.SSP_PUSH:
        return
    heads = 40 * 6 * 12
    first_value = 4 * 1_000  # goes out from rank 0, and comes back to both
    for rank in range(2):
        for way, initial in enumerate((first_value if rank == 0 else 0, first_value)):
            half = (whole[rank][way] - initial) / 2
            assert abs(sizes[rank][way] - initial - half) < heads


def test_stale_changes_are_halved_and_end_in_the_right_sum() -> None:
    spec = store(Precision.BFLOAT16, staleness=2)
    (first, second), sizes = train(spec, bind=False)
    assert first[-1].tobytes() == second[-1].tobytes()
    exact = -10 * 1.5 * np.linspace(1e-5, 1, 1_000, dtype=np.float32)
    np.testing.assert_allclose(first[-1], exact, atol=0.01)
    _, plain = train(store(Precision.FLOAT32, staleness=2), bind=False)
    assert sizes[1][0] < 0.7 * plain[1][0]


@pytest.mark.parametrize("clock", [0, 2], ids=["before the first value", "that skips one"])
def test_a_change_out_of_turn_is_refused(clock: int) -> None:
    session = Session(0, joined_shard(precision=Precision.FLOAT16)[1])
    if clock:
        first = m.Value(0, 0, 0, 0, np.zeros(8, dtype=np.float32))
        session.values.land(0, first)
        session.receive(0, first)
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        session.values.land(0, m.Value(0, 0, clock, 0, np.zeros(8, dtype=np.float16)))


CODECS = ["int8", "int4", "sign", "topk:0.1", "randomk:0.1"]
LEAST = {
    **dict(zip(CODECS, (3.8, 6.9, 27, 6.5, 9.7), strict=True)),
    "topk:0.1/int8": 6.5,
    "sign/none": 27,
    "none/int8": 0.9,
}
"""How many times fewer bytes than as float32 each codec pushes."""
SIZE = 2 * SEGMENT_ELEMENTS + 300


def lossy(
    name: str,
    *,
    workers: int = 3,
    shards: int = 2,
    kind: RuleKind = RuleKind.SGD,
    **settings: object,
) -> StoreSpec:
    rule = Rule(kind=kind) if kind is RuleKind.MEAN else Rule(kind=kind, momentum=0.5)
    tables = (
        TableSpec(name="w", size=SIZE, rule=rule, codec=CodecPair.parse(name)),
        TableSpec(name="exact", size=10),
    )
    return StoreSpec(workers=workers, shards=shards, tables=tables, **settings)  # type: ignore[arg-type]


def gradient(iteration: int, rank: int) -> np.ndarray:
    return np.random.default_rng([iteration, rank]).standard_normal(SIZE).astype(np.float32)


def train_lossy(
    spec: StoreSpec, iterations: int = 6
) -> tuple[list[list[bytes]], list[np.ndarray], list[int]]:
    """Return the bits that each worker reads of "w" in each iteration, rank 0's values, and the
    bytes it pushes.
    """
    read: list[list[bytes]] = [[] for _ in range(spec.workers)]
    values: list[np.ndarray] = []
    sizes = [0] * spec.workers

    def body(client: Client, rank: int) -> None:
        value, exact = np.zeros(SIZE, np.float32), np.zeros(10, np.float32)
        if rank:  # one worker reads without binding
            client.bind(0, value)
        client.start(zeros(spec))
        before = client.statistics().tables[0].bytes_out
        for iteration in range(iterations + 1):
            client.read(0, value)
            client.read(1, exact)
            read[rank].append(value.tobytes())
            if rank == 0:
                values.append(value.copy())
            if spec.clip is None:
                np.testing.assert_array_equal(exact, np.float32(-0.5 * iteration))
            if iteration == iterations:
                break
            client.push(0, gradient(iteration, rank), rate=0.5)
            client.push(1, np.ones(10, np.float32), rate=0.5)
            client.clock()
        client.barrier()
        sizes[rank] = client.statistics().tables[0].bytes_out - before

    with memory_store(spec.workers, spec.shards) as connect:
        run_workers(connect, spec, body)
    return read, values, sizes


@pytest.mark.parametrize(("name", "clip"), sample(list(product(LEAST, [None, 0.5])), every=3))
def test_all_workers_have_the_same_bits_in_every_run_with_any_number_of_shards(
    name: str, clip: float | None
) -> None:
    expected, _, sizes = train_lossy(lossy(name, clip=clip))
    assert expected[0] == expected[1] == expected[2]
    assert len(set(expected[0])) == len(expected[0])
    for shards in (1, 2, 3):
        again, _, _ = train_lossy(lossy(name, shards=shards, clip=clip))
        assert again == expected
    heads = 6 * 3 * 60
    assert 4 * SIZE * 6 / (sizes[0] - heads) > LEAST[name]


@pytest.mark.parametrize("name", ["int8", "none/int8"])
def test_int8_is_near_the_exact_values(name: str) -> None:
    _, values, _ = train_lossy(lossy(name))
    exact, history = np.zeros(SIZE), np.zeros(SIZE)
    for iteration in range(6):
        history = 0.5 * history + 0.5 * np.mean(
            [gradient(iteration, rank) for rank in range(3)], axis=0
        )
        exact = exact - history
    np.testing.assert_allclose(values[-1], exact, atol=0.06)


@pytest.mark.parametrize("name", CODECS)
def test_means_are_encoded_with_what_was_held_back(name: str) -> None:
    """A mean is not a sum of changes: it is what the last encoding holds, and nothing of the
    gradients is lost.
    """
    codec = codec_of(name)
    chunk = Chunk(table=0, index=0, start=0, stop=SIZE, shard=0)
    replica = EncodedReplica(torch.ones(SIZE), chunk, codec, replaces=True)
    given = received = np.zeros(SIZE)
    for clock in range(4):
        mean = torch.from_numpy(gradient(clock, 0))
        replica.follow(mean, clock)
        got = np.zeros(SIZE, np.float32)
        codec.add(got, replica.change.numpy(), key_of(chunk, clock))
        assert got.tobytes() == replica.value.numpy().tobytes()
        given, received = given + mean.numpy(), received + got
    assert replica.held_back is not None
    np.testing.assert_allclose(received + replica.held_back.numpy(), given, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "topk:0.1", "sign/none", "none/int8"])
def test_workers_read_equal_means(name: str) -> None:
    expected, values, _ = train_lossy(lossy(name, kind=RuleKind.MEAN))
    assert expected[0] == expected[1] == expected[2]
    if name == "int8":
        for iteration, value in enumerate(values[1:]):
            mean = np.mean([gradient(iteration, rank) for rank in range(3)], axis=0)
            np.testing.assert_allclose(value, mean, atol=0.08)


def test_tables_with_a_codec_are_cut_between_segments() -> None:
    tables = tuple(
        TableSpec(name=n, size=s, rows=r, codec=CodecPair.parse("sign"))
        for n, s, r in (("a", 50_000, 0), ("b", 200_001, 7), ("c", 5, 0), ("d", 1_000_000, 1))
    )
    for shards in (1, 2, 7):
        store = StoreSpec(workers=1, shards=shards, tables=tables)
        for row, spec in zip(place(store).chunks, tables, strict=True):
            assert [chunk.stop for chunk in row[:-1]] == [chunk.start for chunk in row[1:]]
            assert (row[0].start, row[-1].stop) == (0, spec.size)
            assert all(chunk.start % SEGMENT_ELEMENTS == 0 for chunk in row)


def joined_shard(**table: object) -> tuple[Shard, StoreSpec]:
    spec = StoreSpec(
        workers=1,
        shards=1,
        tables=(TableSpec(name="w", size=8, codec=CodecPair.parse("topk:0.25")),),
    )
    if table:
        spec = replace(spec, tables=(TableSpec(name="w", size=8),), **table)  # type: ignore[arg-type]
    shard = Shard(0, 1)
    shard.handle(b"a", m.Hello(0, b""))
    shard.handle(b"a", m.Create(spec))
    shard.handle(b"a", m.Initial(0, 0, [np.zeros(8, dtype=np.float32)]))
    return shard, spec


def test_a_push_of_the_wrong_precision_is_refused() -> None:
    shard, _ = joined_shard(precision=Precision.FLOAT16)
    (answer,) = shard.handle(b"a", m.Push(0, 0, 0, 1.0, np.zeros(8, dtype=np.float32)))
    assert isinstance(answer.message, m.Fault)
    assert "as float32" in answer.message.reason


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(8, np.float32), "as float32"),
        (np.zeros(11, np.uint8), "takes 12 encoded bytes; 11 came"),
        (np.zeros(12, np.uint8), "do not increase"),
    ],
)
def test_a_push_that_no_encoder_makes_changes_nothing(array: np.ndarray, reason: str) -> None:
    shard, _ = joined_shard()
    (answer,) = shard.handle(b"a", m.Push(0, 0, 0, 1.0, array))
    assert isinstance(answer.message, m.Fault)
    assert reason in answer.message.reason
    good = np.zeros(12, np.uint8)
    good[:4].view("<u2")[:] = [2, 5]
    good[4:].view("<f4")[:] = [1.0, -2.0]
    (value,) = shard.handle(b"a", m.Push(0, 0, 0, 1.0, good))
    assert isinstance(value.message, m.Value)
    assert (
        value.message.array.tobytes()
        == np.concatenate([good[:4], (-good[4:].view("<f4")).view(np.uint8)]).tobytes()
    )


@pytest.mark.parametrize(
    "array",
    [np.zeros(12, np.uint8), np.zeros(16, np.uint8), np.zeros(8, np.float16)],
    ids=["positions", "size", "type"],
)
def test_a_change_that_no_encoder_makes_is_refused(array: np.ndarray) -> None:
    _, spec = joined_shard()
    session = Session(0, spec)
    first = m.Value(0, 0, 0, 0, np.ones(8, dtype=np.float32))
    session.values.land(0, first)
    session.receive(0, first)
    with pytest.raises(RemoteProtocolError):
        session.values.land(0, m.Value(0, 0, 1, 0, array))
    (piece,) = session.values.take(0)
    assert piece.value.tolist() == [1.0] * 8


@pytest.mark.parametrize(
    "settings",
    [{"staleness": 1}, {"keeping": Keeping.AVERAGE}, {"keeping": Keeping.COPY}],
    ids=["stale", "average", "copy"],
)
def test_only_tables_whose_rule_runs_on_the_shards_have_a_codec(
    settings: dict[str, object],
) -> None:
    with pytest.raises(SpecError, match="expected none at staleness > 0"):
        TableSpec(name="w", size=8, codec=CodecPair.parse("int8"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("consistency", [Consistency.SSP, Consistency.SSP_AGGR])
def test_values_on_request_have_no_codec(consistency: Consistency) -> None:
    with pytest.raises(SpecError, match="needs SSPPush"):
        lossy("int8", consistency=consistency)
