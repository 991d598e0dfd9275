"""One iteration of a net of two layers, worked out by hand.

Links carry one number a second, a layer's forward pass takes 1.5 s and its backward pass 3 s, time
0 is the end of the upper layer's backward pass. With two hosts half of each tensor crosses a link
each way.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation.simulator import Simulation, simulate
from poseidon.observe.plan.scenario import PlannedExchange, Scenario
from poseidon.observe.plan.shapes import LayerShape, Machine

LOW = LayerShape(name="low", tensors=((4, 1, 1, 1),), work=1)
HIGH = LayerShape(name="high", tensors=((8, 1, 1, 1),), work=1)
MATRIX = LayerShape(name="matrix", tensors=((2, 4),), work=1, fully_connected=True)
WHOLE = 1000
PS = Scenario(
    layers=(LOW, HIGH),
    batch=1,
    compute_s=9.0,
    workers=2,
    exchange=PlannedExchange.PS,
    bits_per_s=32.0,
    chunk_bytes=4,
    piece_bytes=WHOLE,
    machine=Machine(buffer_bytes=0),
)


def predict(scenario: Scenario) -> float:
    return simulate(scenario).seconds


def test_one_host_computes_and_no_more() -> None:
    for exchange in PlannedExchange:
        assert predict(replace(PS, workers=1, exchange=exchange)) == pytest.approx(9.0)


def test_gradients_leave_during_the_backward_pass() -> None:
    # Out of a host: high 0-4, low 4-6, the values of high 6-10, of low 10-12; then 3 s forward, 3 s
    # of backward.
    assert predict(PS) == pytest.approx(18.0)


def test_without_wait_free_everything_waits_for_the_backward_pass() -> None:
    # The same from 3 s on, and both layers wait for 15.
    assert predict(replace(PS, wait_free=False)) == pytest.approx(21.0)


def test_a_round_of_local_steps_has_one_exchange_that_nothing_hides() -> None:
    assert predict(replace(PS, local_steps=3)) == pytest.approx((9.0 + 9.0 + 21.0) / 3)


def test_processor_seconds_are_those_of_all_hosts() -> None:
    # Of 48 bytes the two shards add 48 a worker; a worker sends half of them to the other shard,
    # and receives half.
    machine = Machine(buffer_bytes=0, sum_s_per_byte=0.01, wire_s_per_byte=0.1)
    sums_s, ends_s = 2 * 48 * 0.01, 2 * 2 * 48 * 0.1
    for cores in (0.5, 1.0, 4.0):
        job = replace(PS, machine=replace(machine, cores=cores))
        assert simulate(job).cpu_s == pytest.approx(sums_s + ends_s)


def test_lower_layers_overtake_piece_by_piece() -> None:
    # h0 h1 | h0' | l0 | h1' | l1 | l0' | h2 | l1' at 9, and low goes forward until 10.5; | h3 | h2'
    # | h3' at 12.
    assert predict(replace(PS, piece_bytes=8)) == pytest.approx(16.5)


def test_factors_leave_before_the_layers_own_backward_pass() -> None:
    # u and v: 6 numbers from -3 to 3; low 3-5 and back 5-7.
    layers = (LOW, MATRIX)
    for exchange in (PlannedExchange.SVB, PlannedExchange.HYBRID):
        assert predict(replace(PS, layers=layers, exchange=exchange)) == pytest.approx(13.0)


def test_pushes_give_way_to_factors() -> None:
    # u and v: 12 numbers from -3 to 9, though low has its gradient at 3; low 9-11 and back by 13.
    layers = (LOW, MATRIX)
    assert predict(
        replace(PS, layers=layers, exchange=PlannedExchange.SVB, batch=2, piece_bytes=8)
    ) == pytest.approx(19.0)


def test_hybrid_sends_a_gradient_that_is_smaller_than_its_factors() -> None:
    many = replace(PS, layers=(LOW, MATRIX), batch=2)
    assert predict(replace(many, exchange=PlannedExchange.HYBRID)) == predict(many)
    assert predict(replace(many, exchange=PlannedExchange.SVB)) > predict(many)


def test_a_ring_begins_with_the_last_gradient_of_its_bucket_and_all_wait_for_it() -> None:
    # Both layers from 3 on: 12 numbers; then 3 s forward and 3 s of backward.
    assert predict(replace(PS, exchange=PlannedExchange.RING)) == pytest.approx(21.0)
    # Each layer its own: high 0-8, low 8-12.
    assert predict(replace(PS, exchange=PlannedExchange.RING, bucket_bytes=1)) == pytest.approx(
        18.0
    )


def test_machines_that_only_serve_send_while_they_receive() -> None:
    # Into the servers: high 0-8, low 8-12; out of them: high 8-16, low 16-20.
    assert predict(replace(PS, servers=2)) == pytest.approx(26.0)


def test_shards_take_time_for_sums_and_rules() -> None:
    # Half of high is 16 bytes: 2 s; of low 1 s. High 0-4, summed at 6, low 4-6, summed at 7; values
    # 6-10, 10-12.
    rule = replace(PS.machine, rule_s_per_byte=1 / 8)
    assert predict(replace(PS, machine=rule)) == pytest.approx(18.0)
    # Two gradients each: 4 s and 2 s on top. From 6 on both take turns: low is done at 12, high at
    # 13; values 12-14, 14-18.
    both = replace(rule, sum_s_per_byte=1 / 8)
    assert predict(replace(PS, machine=both)) == pytest.approx(22.5)


def test_a_product_takes_the_processors_time_or_the_devices() -> None:
    # 2 x 2 rows x 8 = 32 operations: 4 s, from 3 to 7; low's values arrive at 7; high is waited for
    # until 8.5 only.
    layers = (LOW, MATRIX)
    slow = replace(
        PS, layers=layers, exchange=PlannedExchange.SVB, machine=replace(PS.machine, flops=8.0)
    )
    assert predict(slow) == pytest.approx(13.0)
    # 16 s, until 19: high goes forward then, and backward.
    assert predict(replace(slow, machine=replace(slow.machine, flops=2.0))) == pytest.approx(23.5)
    # The rule takes 8 s of the weight's 32 bytes on top of 4 s: until 15.
    rule = replace(slow.machine, flops=8.0, factors_s_per_byte=1 / 4)
    assert predict(replace(slow, machine=rule)) == pytest.approx(19.5)
    # On the device the other worker's half, from 3 to 11: low must wait for it too: 12.5, 14, 17.
    on_device = replace(slow.machine, flops=2.0, products_on_device=True)
    assert predict(replace(slow, machine=on_device)) == pytest.approx(17.0)


def test_latency_is_paid_once_each_way() -> None:
    # High 0-4, there at 5; low 4-6, there at 7; values 6-10 and 10-12, there at 13.
    assert predict(replace(PS, machine=replace(PS.machine, latency_s=1.0))) == pytest.approx(19.0)


@pytest.mark.parametrize(
    ("workers", "servers"), [(2, 0), (4, 0), (8, 0), (4, 4), (8, 2), (8, 4), (6, 3)]
)
def test_many_pieces_keep_the_busiest_link_busy(workers: int, servers: int) -> None:
    """Each way 2 M (P - 1) / P, 2 M n (n - 1) / (n n + k n - 2 k), or M over the rate, and
    little more.
    """
    layers = tuple(
        LayerShape(name=str(i), tensors=((1000 * (1 + i % 3), 1, 1, 1),), work=1) for i in range(20)
    )
    total = sum(layer.elements for layer in layers)
    n, k = workers, servers
    numbers = (
        max(1.0, 2 * n * (n - 1) / (n * n + k * n - 2 * k)) * total
        if k
        else 2 * total * (n - 1) / n
    )
    found = predict(
        replace(
            PS,
            layers=layers,
            workers=workers,
            servers=servers,
            piece_bytes=400,
            machine=Machine(buffer_bytes=4000),
        )
    )
    assert numbers <= found <= 1.05 * numbers + 9


def test_messages_take_processor_time() -> None:
    # High is 8 messages, half of them to the own host's shard: with 1/4 s a message 2 s, no slower
    # than the wire.
    quick = replace(PS.machine, message_s=0.25)
    assert predict(replace(PS, machine=quick)) == pytest.approx(18.0)
    # With 3/4 s and one core for both: high 6 s for the worker and 6 for the shard, 0-12, low 3 and
    # 3, 12-18; back 18-30, 30-36.
    slow = replace(PS.machine, message_s=0.75, cores=1.0)
    assert predict(replace(PS, machine=slow)) == pytest.approx(42.0)


def test_what_stays_on_a_host_passes_in_memory() -> None:
    # Half of high is 16 bytes; worker and shard share a core, so high 0-12, low 12-18, and back
    # 18-30, 30-36.
    machine = replace(PS.machine, memory_s_per_byte=0.375, cores=1.0)
    assert predict(replace(PS, machine=machine)) == pytest.approx(42.0)


def test_a_ring_copies_gradients_into_its_buckets() -> None:
    # High is 32 bytes: 0-16, in place of the 8 s on the wire; low 16-24.
    machine = replace(PS.machine, memory_s_per_byte=0.5, cores=1.0)
    assert predict(
        replace(PS, exchange=PlannedExchange.RING, bucket_bytes=1, machine=machine)
    ) == pytest.approx(30.0)


def test_a_ring_takes_processor_time_and_so_does_its_optimizer() -> None:
    # High is 32 bytes: 0-16, in place of the 8 s on the wire; low 16-24.
    ring = replace(PS, exchange=PlannedExchange.RING, bucket_bytes=1)
    machine = replace(PS.machine, ring_s_per_byte=0.5, cores=1.0)
    assert predict(replace(ring, machine=machine)) == pytest.approx(30.0)
    # Both layers are 48 bytes: 3 s once all is there.
    assert predict(
        replace(ring, machine=replace(PS.machine, optimizer_s_per_byte=1 / 16))
    ) == pytest.approx(21.0)


def run(scenario: Scenario) -> Simulation:
    simulation = Simulation(scenario)
    simulation.run()
    return simulation


def test_processors_are_busy_with_sums_and_rules() -> None:
    # A rule of 1/8 s a byte is 3 s of the shard's core in each iteration, and nothing of the
    # worker's.
    done = run(replace(PS, machine=replace(PS.machine, rule_s_per_byte=1 / 8)))
    assert done.busy == pytest.approx(4 * 3 / 2 / done.begins_s[-1])
    # Both on one core: all of it is at work.
    done = run(replace(PS, machine=replace(PS.machine, rule_s_per_byte=1 / 8, cores=1.0)))
    assert done.busy == pytest.approx(4 * 3 / done.begins_s[-1])
    assert run(replace(PS, workers=1)).busy == 0


def test_links_carry_less_the_busier_processors_are() -> None:
    plain = replace(PS.machine, rule_s_per_byte=1 / 8)
    busy = run(replace(PS, machine=plain)).busy
    expected = predict(replace(PS, machine=replace(plain, goodput=1 - busy / 2)))
    assert predict(replace(PS, machine=replace(plain, busy_goodput=0.5))) == pytest.approx(expected)
    assert expected > predict(replace(PS, machine=plain))


def test_a_shard_answers_when_it_has_a_chunk_of_every_worker() -> None:
    # In one piece on one shard: high comes over its link 0-8, low 4-8; back go high 8-16 and low
    # 12-16.
    assert predict(replace(PS, chunk_bytes=WHOLE)) == pytest.approx(22.0)
