"""The formula for one iteration of a net of two layers, worked out by hand.

Links carry one number a second. With two hosts half of each tensor crosses a link each way.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from poseidon.observe.plan.iteration import iteration_of, predict
from poseidon.observe.plan.scenario import PlannedExchange, Scenario, WireCodec
from poseidon.observe.plan.shapes import LayerShape, Machine

LOW = LayerShape(name="low", tensors=((4, 1, 1, 1),), work=1)
HIGH = LayerShape(name="high", tensors=((8, 1, 1, 1),), work=1)
MATRIX = LayerShape(name="matrix", tensors=((2, 4),), work=1, fully_connected=True)
PS = Scenario(
    layers=(LOW, HIGH),
    batch=1,
    compute_s=9.0,
    workers=2,
    exchange=PlannedExchange.PS,
    bits_per_s=32.0,
    chunk_bytes=4,
)
RING = replace(PS, exchange=PlannedExchange.RING)


def norm(*seconds: float) -> float:
    return float(sum(each**4 for each in seconds) ** 0.25)


@pytest.mark.parametrize(
    ("scenario", "seconds"),
    [
        # Each way 12 numbers: 6 of a gradient to the other shard, 6 of values from the own one.
        (PS, norm(9, 12)),
        (replace(PS, wait_free=False), 9 + 12),
        (replace(PS, local_steps=3), (9 + 9 + 9 + 12) / 3),
        (replace(PS, lossy=WireCodec.HALF), norm(9, 6)),
        # Two hosts that serve: 12 numbers of each worker on both, and 2 of the first chunk before
        # one answers.
        (replace(PS, servers=2), norm(9, 12 + 2)),
        # Factors are 6 numbers, low's 4 cross as before.
        (replace(PS, layers=(LOW, MATRIX), exchange=PlannedExchange.SVB), norm(9, 4 + 6)),
        (replace(PS, machine=Machine(latency_s=1.0)), norm(9, 14)),
        # One bucket: 3 s forward, 6 s of backward, and nothing to hide it. Two: high's part is
        # hidden, low's is not.
        (RING, 9 + 12),
        (replace(RING, bucket_bytes=1), 3 + norm(6, 8) + 4),
        (replace(RING, wait_free=False), 9 + 12),
        (replace(RING, bucket_bytes=1, machine=Machine(latency_s=1.0)),
         3 + norm(6, 16 * 2 / 3) + 16 / 3),
    ],
)  # fmt: skip
def test_compute_and_links(scenario: Scenario, seconds: float) -> None:
    assert predict(scenario) == pytest.approx(seconds)


def test_one_host_computes_and_no_more() -> None:
    for exchange in PlannedExchange:
        alone = iteration_of(replace(PS, workers=1, exchange=exchange))
        assert (alone.seconds, alone.cpu_s) == (9.0, 0.0)


@pytest.mark.parametrize(
    ("costs", "worker_s", "shard_s"),
    [
        # 48 bytes: half to the other host's shard, and as much back; the other half in memory.
        ({"wire_s_per_byte": 0.5}, 24.0, 24.0),
        ({"memory_s_per_byte": 0.25}, 12.0, 12.0),
        # 12 messages each way, of a worker and of a shard.
        ({"message_s": 1.0}, 24.0, 24.0),
        ({"sum_s_per_byte": 0.5}, 0.0, 24.0),
        ({"rule_s_per_byte": 0.5}, 0.0, 12.0),
    ],
)
def test_processors(costs: dict[str, float], worker_s: float, shard_s: float) -> None:
    own = iteration_of(replace(PS, machine=Machine(cores=2.0, **costs)))  # type: ignore[arg-type]
    assert own.seconds == pytest.approx(norm(9, 12, max(worker_s, shard_s)))
    assert own.cpu_s == pytest.approx(2 * (worker_s + shard_s))
    for cores in (1.0, 0.5):
        machine = Machine(cores=cores, **costs)  # type: ignore[arg-type]
        shared = iteration_of(replace(PS, machine=machine))
        assert shared.seconds == pytest.approx(norm(9, 12, (worker_s + shard_s) / cores))
        assert shared.cpu_s == own.cpu_s


def test_products_of_factors_take_a_core_or_the_accelerator() -> None:
    # 2 rows x 2 x 8 = 32 operations, 32 bytes of weight.
    svb = replace(PS, layers=(LOW, MATRIX), exchange=PlannedExchange.SVB)
    on_core = Machine(flops=2.0, factors_s_per_byte=0.25)
    assert predict(replace(svb, machine=on_core)) == pytest.approx(norm(9, 10, 16 + 8))
    # The worker's own half of the products is a part of the net's computation.
    on_device = replace(on_core, products_on_device=True)
    assert predict(replace(svb, machine=on_device)) == pytest.approx(norm(9 + 8 + 8, 10))


def test_a_ring_adds_on_a_core_and_the_optimizer_comes_after_it() -> None:
    machine = Machine(ring_s_per_byte=0.5, optimizer_s_per_byte=0.25)
    found = iteration_of(replace(RING, machine=machine))
    assert found.seconds == pytest.approx(9 + norm(12, 24) + 12)
    assert found.cpu_s == pytest.approx(2 * (24 + 12))
