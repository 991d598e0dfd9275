"""Tables whose gradients have few rows: the bits of all elements, in fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ps_server import (
    Client,
    CodecPair,
    Consistency,
    Precision,
    RemoteProtocolError,
    Rule,
    RuleKind,
    StoreSpec,
    TableSpec,
)
from ps_server.protocol.messages import Array
from ps_server.protocol.packed_rows import ChunkRows
from ps_server.protocol.placement import Chunk
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.cluster import memory_store, run_workers

ROW, ROWS, STEPS, LOOKUPS = 24, 4_000, 4, 50


@pytest.mark.parametrize("start, size", [(0, 70), (3, 70), (7, 2), (4, 20), (10, 5)])
def test_rows_that_are_left_out_keep_their_bits(start: int, size: int) -> None:
    rows = ChunkRows.of(Chunk(table=0, index=0, start=start, stop=start + size, shard=0), 5)
    before = np.arange(start, start + size, dtype=np.float32)
    after = before.copy()
    for place in (0, size // 2, size - 1):
        after[place] = -0.0
    packed = rows.pack_changed(after, before)
    if packed is None:
        assert size < 50
        return
    assert packed.nbytes < after.nbytes
    rows.check(packed)
    rows.unpack(packed, before)
    assert before.tobytes() == after.tobytes()


def test_bytes_of_rows() -> None:
    rows = ChunkRows.of(Chunk(table=0, index=0, start=0, stop=1000, shard=0), 10)
    array = np.zeros(1000, np.float32)
    array[[13, 990]] = 1, -0.0
    packed = rows.pack_nonzero(array)
    assert packed is not None
    assert packed.nbytes == 2 * (4 + 4 * 10)
    assert rows.pack_nonzero(np.ones(1000, np.float32)) is None
    none = rows.pack_nonzero(np.zeros(1000, np.float32))
    assert none is not None
    assert none.tobytes() == bytes(4 + 4 * 10)  # an empty array is an iteration that is skipped


WRONG = {
    "nothing": b"",
    "half a row": b"\0" * 12,
    "no words": b"\0" * 43,
    "twice the same": np.zeros(22, np.uint32).tobytes(),
    "beyond the chunk": np.full(11, 100, np.uint32).tobytes(),
}


@pytest.mark.parametrize("packed", WRONG.values(), ids=WRONG.keys())
def test_other_bytes_are_refused(packed: bytes) -> None:
    rows = ChunkRows.of(Chunk(table=0, index=0, start=0, stop=1000, shard=0), 10)
    with pytest.raises(RemoteProtocolError):
        rows.check(np.frombuffer(packed, np.uint8))


def gradient(worker: int, step: int, row: int) -> Array:
    """Of some rows in one half of the table, at last the same half for all workers."""
    draw = np.random.default_rng([worker, max(1, step)])  # twice the same
    found = np.zeros((ROWS, row), np.float32)
    first = ROWS // 2 if worker and step < STEPS - 1 else 0
    found[draw.integers(first, first + ROWS // 2, LOOKUPS)] = draw.standard_normal(row)
    return found.reshape(-1)


def trained(store: StoreSpec) -> tuple[list[bytes], int, int]:
    """Return what each worker ends with, and the bytes that worker 0 has sent and received."""
    found: list[bytes] = [b""] * store.workers
    sizes = [0, 0]

    def work(client: Client, rank: int) -> None:
        size = store.tables[0].size
        first = np.random.default_rng(9).standard_normal(size).astype(np.float32)
        value = np.zeros_like(first)
        is_mean = store.tables[0].rule.kind is RuleKind.MEAN
        if is_mean:
            client.bind(0, value)
        client.start(lambda table: [first])
        client.read(0, value)
        began = client.statistics().tables[0]
        for step in range(STEPS):
            if is_mean:
                value.fill(7.0)  # a script may clip a mean gradient, or set it to zero
            client.push(0, gradient(rank, step, size // ROWS), rate=0.1)
            client.clock()
            client.read(0, value)
        ended = client.statistics().tables[0]
        found[rank] = value.tobytes()
        if rank == 0:
            sizes[:] = (ended.bytes_out - began.bytes_out, ended.bytes_in - began.bytes_in)

    with memory_store(store.workers, store.shards) as connect:
        run_workers(connect, store, work)
    return found, sizes[0], sizes[1]


RULES = {
    "SGD": Rule(),
    "AdaGrad": Rule(kind=RuleKind.ADAGRAD),
    "momentum": Rule(momentum=0.9),
    "decay": Rule(decay=0.1),
    "mean": Rule(kind=RuleKind.MEAN),
}


@pytest.mark.parametrize(("row", "clip"), [(ROW, None), (ROW, 0.5), (32, None)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_values_are_those_of_whole_gradients(rule: Rule, row: int, clip: float | None) -> None:
    """Also where a chunk has whole rows only, and no gradient."""
    table = TableSpec(name="rows", size=ROWS * row, rule=rule, row_elements=row)
    store = StoreSpec(workers=2, shards=2, tables=(table,), clip=clip)
    whole = replace(store, tables=(replace(table, row_elements=0),))
    found, sent, received = trained(store)
    expected, all_sent, all_received = trained(whole)
    assert found == expected
    rows = LOOKUPS * (4 + 4 * row)
    assert sent <= 1.1 * STEPS * rows < all_sent / 10
    if rule.decay:
        assert received == all_received
    elif rule.momentum:
        assert 2 * STEPS * rows < received < all_received / 5
    else:
        assert received <= 1.1 * 2 * STEPS * rows


OTHERS = {
    "16 bits": {"precision": Precision.BFLOAT16},
    "on request": {"consistency": Consistency.SSP},
    "virtual workers": {"virtual_workers": VirtualWorkers((0, 1, 2))},
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS.keys())
def test_stores_with_and_without_rows_agree(more: dict[str, object]) -> None:
    table = TableSpec(name="rows", size=ROWS * ROW, row_elements=ROW)
    store = StoreSpec(workers=2, shards=1, tables=(table,), **more)  # type: ignore[arg-type]
    whole = replace(store, tables=(replace(table, row_elements=0),))
    assert trained(store)[0] == trained(whole)[0]


def test_a_codec_and_staleness_take_the_place_of_rows() -> None:
    table = TableSpec(name="rows", size=ROWS * ROW, row_elements=ROW)
    store = StoreSpec(workers=1, shards=1, tables=(table,))
    assert store.packs_rows(table)
    assert not store.packs_rows(replace(table, codec=CodecPair.parse("int8")))
    assert not store.packs_rows(replace(table, staleness=1))
