"""What a scenario makes of a net: each layer's time and bytes, by Poseidon's own rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poseidon.exchange.server.placed import POOL_ELEMENTS
from poseidon.observe.plan.scenario import (
    MIB,
    Lossy,
    PlannedExchange,
    PlannedLowRank,
    Scenario,
    WireCodec,
    buckets,
    link_bytes,
    loads,
    low_rank_elements,
    parts,
)
from poseidon.observe.plan.shapes import LayerShape, Machine

CONV = LayerShape(name="conv", tensors=((64, 3, 3, 3), (64,)), work=300)
FC = LayerShape(name="fc", tensors=((1000, 2000), (1000,)), work=100, fully_connected=True)
TWO = Scenario(layers=(CONV, FC), batch=10, compute_s=12.0, workers=4, bits_per_s=8e9)


def test_time_goes_by_work_and_a_third_of_it_forward() -> None:
    low, high = loads(TWO)
    assert (low.forward_s, low.backward_s) == pytest.approx((3.0, 6.0))
    assert (high.forward_s, high.backward_s) == pytest.approx((1.0, 2.0))


def test_factors_and_what_is_left_for_the_shards() -> None:
    low, high = loads(TWO)
    assert (low.factors, low.dense_bytes) == (None, 4 * (64 * 27 + 64))
    assert high.dense_bytes == 4 * 1000
    assert high.factors is not None
    assert high.factors.link_bytes == 10 * 3 * 3000 * 4
    assert high.factors.products == 2 * 40 * 1000 * 2000
    assert high.factors.weight_bytes == 8_000_000


@pytest.mark.parametrize(
    ("exchange", "batch", "by_factors"),
    [
        (PlannedExchange.PS, 1, False),
        (PlannedExchange.RING, 1, False),
        (PlannedExchange.HYBRID, 333, True),  # 4 x 333 is below 2 M N / (M + N) = 1333.3
        (PlannedExchange.HYBRID, 334, False),
        (PlannedExchange.SVB, 334, True),
    ],
)
def test_the_rule_decides(exchange: PlannedExchange, batch: int, by_factors: bool) -> None:
    high = loads(replace(TWO, exchange=exchange, batch=batch))[1]
    assert (high.factors is not None) is by_factors


def test_one_worker_has_no_factors() -> None:
    assert loads(replace(TWO, workers=1, exchange=PlannedExchange.SVB))[1].factors is None


@pytest.mark.parametrize(
    ("workers", "servers", "working", "serving"),
    [(4, 0, 1 / 4, 0), (4, 2, 1 / 10, 3 / 10), (4, 4, 0, 1 / 4), (2, 8, 0, 1 / 8)],
)
def test_parts_of_the_model(workers: int, servers: int, working: float, serving: float) -> None:
    found = parts(workers, servers)
    assert found == pytest.approx((working, serving))
    assert workers * found[0] + servers * found[1] == pytest.approx(1)


def test_buckets_from_the_top_down() -> None:
    assert buckets([10 * MIB, 20 * MIB, 6 * MIB, MIB], 25 * MIB) == [(3,), (2, 1), (0,)]
    assert buckets([4, 8], 25 * MIB) == [(1, 0)]
    assert buckets([4, 8], 1) == [(1,), (0,)]


def test_every_chunk_is_a_message_and_small_tensors_share_one() -> None:
    low, high = loads(replace(TWO, chunk_bytes=1000))
    assert low.messages == pytest.approx(6.912 + 0.256)  # both are small
    assert high.messages == 4  # the bias; the weight goes as factors
    assert (
        loads(replace(TWO, exchange=PlannedExchange.PS, chunk_bytes=1000))[1].messages == 8000 + 4
    )
    assert loads(replace(TWO, chunk_bytes=MIB))[1].messages == pytest.approx(1000 / POOL_ELEMENTS)


@pytest.mark.parametrize(
    ("workers", "servers", "largest"),
    [
        (2, 0, 64 * 1024 * 4),  # 8 MB on 2 shards: the store's least
        (16, 16, 64 * 1024 * 4),
        (64, 0, 32 * 1024 * 4),  # less than half of one a shard: halved
        (512, 0, 4 * 1024 * 4),  # down to what is worth a message
    ],
)
def test_chunks_are_as_the_store_cuts_them(workers: int, servers: int, largest: int) -> None:
    layers = (replace(FC, fully_connected=False),)
    (load,) = loads(
        replace(TWO, exchange=PlannedExchange.PS, layers=layers, workers=workers, servers=servers)
    )
    assert load.chunk_bytes == largest
    assert load.messages == pytest.approx(
        -(-8_000_000 // largest) + 4000 / min(largest, 4 * POOL_ELEMENTS)
    )


@pytest.mark.parametrize(
    ("shape", "rank", "count"),
    [
        ((30, 20), 1, 50),
        ((30, 20), 4, 200),
        ((30, 20), 8, 600),
        ((20, 16, 3, 3), 4, 4 * (20 + 144)),
        ((30,), 1, 30),
        ((), 2, 1),
    ],
)
def test_low_rank_is_for_tensors_that_it_halves(
    shape: tuple[int, ...], rank: int, count: int
) -> None:
    assert low_rank_elements(shape, rank) == count


@pytest.mark.parametrize(
    ("lossy", "part"),
    [(None, 1.0), (WireCodec.HALF, 0.5), (PlannedLowRank(rank=2), (2 * 91 + 64) / (64 * 27 + 64))],
)
def test_what_is_encoded_is_a_part_of_the_bytes(lossy: Lossy | None, part: float) -> None:
    ring = replace(TWO, exchange=PlannedExchange.RING, lossy=lossy)
    low, _ = loads(ring)
    assert low.wire_part == pytest.approx(part)
    machine = Machine(ring_half_s_per_byte=1e-9, ring_low_rank_s_per_byte=1e-9)
    encoded, _ = loads(replace(ring, machine=machine))
    assert (encoded.codec_s > 0) is (lossy is not None)
    if lossy is WireCodec.HALF:
        assert link_bytes(ring) == pytest.approx(link_bytes(replace(ring, lossy=None)) / 2)


def test_a_weight_travels_as_factors_where_they_are_fewer_bytes_than_its_codec() -> None:
    """FC's factors are fewer bytes than float32, and more than PowerSGD's P and Q."""
    assert loads(replace(TWO, lossy=None))[1].factors is not None
    high = loads(replace(TWO, lossy=PlannedLowRank(rank=1)))[1]
    assert high.factors is None
    assert high.dense_bytes < 4 * 1000 * 10


def test_powersgd_through_the_shards_sends_both_factors_and_takes_the_workers_time() -> None:
    machine = Machine(low_rank_s_per_byte=1e-9, low_rank_s_per_byte_and_rank=1e-10)
    low, _ = loads(
        replace(TWO, exchange=PlannedExchange.PS, lossy=PlannedLowRank(rank=2), machine=machine)
    )
    assert low.dense_bytes == 4 * (2 * 64 + 2 * 27 + 64)
    assert low.worker_s == pytest.approx(4 * 64 * 27 * (1e-9 + 2 * 1e-10))
    assert (low.wire_part, low.codec_s) == (1.0, 0.0)
    # each factor has a message of its own, and the 64 others a part of a pool's
    assert 2 < low.messages < 2.1
    assert loads(replace(TWO, exchange=PlannedExchange.PS, machine=machine))[0].worker_s == 0


def test_a_layer_without_tensors_takes_time_and_sends_nothing() -> None:
    head = LayerShape(name="head", tensors=(), work=400)
    low, high, last = loads(replace(TWO, layers=(CONV, FC, head)))
    assert (last.dense_bytes, last.messages, last.factors) == (0, 0, None)
    assert last.forward_s == pytest.approx(2.0)
    assert high.factors is not None
    assert low.factors is None


def test_a_layer_may_have_rows_of_its_own() -> None:
    for rows, by_factors in ((333, True), (334, False)):
        own = replace(FC, rows=rows)
        high = loads(replace(TWO, layers=(CONV, own), batch=1))[1]
        assert (high.factors is not None) is by_factors
        if high.factors:
            assert high.factors.link_bytes == rows * 3 * 3000 * 4
