"""The time of an iteration by a formula. Pure.

An iteration uses three things at the same time: the accelerator for c seconds, the busiest link for
L, the busiest processor for W. Each is a sum over the tensors: c and W from the costs of a host, L
from the bytes of the job's own rule (`poseidon/exchange/cost.py`). What takes longest sets the
pace:

    shards       norm(c, L, W)
    ring         c/3 + norm(2c/3, (1 - f) L, (1 - f) W) + norm(f L, f W) + the optimizer's steps
    one by one   c + norm(L, W), for the last step of a round and without wait-free sending

norm(a, b, ...) is (a^4 + b^4 + ...)^(1/4): the greatest, and a fifth more where two are equal,
since neither hides all of the other. f is the part of the model in a ring's last bucket, which
nothing is left to hide; the next forward pass waits for it.
benchmarks/results/simulation.md compares this with measurements, and with a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from poseidon.exchange.auto.rates import Rates, fastest_schemes
from poseidon.exchange.cost import ELEMENT_BYTES, server_bytes
from poseidon.exchange.options import Scheme
from poseidon.observe.plan.scenario import (
    LayerLoad,
    PlannedExchange,
    Scenario,
    buckets,
    choices_of_weights,
    link_bytes,
    loads,
    parts,
    topology_of,
)
from poseidon.observe.plan.shapes import Machine, elements

EXPONENT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """An iteration in the steady state; of local steps the mean of a round.

    Attributes:
        cpu_s: processor seconds of the exchange, all hosts together.
    """

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """What an iteration asks of each host, in seconds of one core.

    Attributes:
        shard_s: of the shard on the worker's host.
        serving_s: of the shard of a host that only serves.
        device_s: of the accelerator, besides the net's own computation.
        after_s: of the worker, once everything has arrived.
    """

    worker_s: float
    shard_s: float = 0.0
    serving_s: float = 0.0
    device_s: float = 0.0
    after_s: float = 0.0


def predict(scenario: Scenario) -> float:
    """Return the seconds of an iteration in the steady state, see `iteration_of`."""
    return iteration_of(scenario).seconds


def iteration_of(scenario: Scenario) -> Iteration:
    """Return an iteration in the steady state."""
    if scenario.local_steps > 1:
        return local_steps(scenario, iteration_of)
    if scenario.workers == 1:
        return Iteration(seconds=scenario.compute_s, cpu_s=0.0)
    found = loads(scenario)
    ring = scenario.exchange is PlannedExchange.RING
    work = _ring_work(scenario, found) if ring else _server_work(scenario, found)
    cpu_s = scenario.workers * (work.worker_s + work.shard_s + work.after_s)
    seconds = _ring_s(scenario, found, work) if ring else _server_s(scenario, found, work)
    return Iteration(seconds=seconds, cpu_s=cpu_s + scenario.servers * work.serving_s)


def local_steps(scenario: Scenario, iteration_of: Callable[[Scenario], Iteration]) -> Iteration:
    """Return the mean iteration of a round: nothing hides the exchange at its end.

    Args:
        iteration_of: returns an iteration of a scenario without them.
    """
    machine, steps, turns = scenario.machine, scenario.local_steps, scenario.turns
    last = iteration_of(replace(scenario, local_steps=1, wait_free=False))
    own_s_per_byte = turns * machine.optimizer_s_per_byte
    if turns > 1:  # the values of a virtual worker are copied to the net, and back
        own_s_per_byte += turns * 2 * machine.memory_s_per_byte
    own_s = own_s_per_byte * elements(scenario.layers) * ELEMENT_BYTES
    apart_s = scenario.compute_s + own_s / _speed(machine)
    return Iteration(
        seconds=((steps - 1) * apart_s + last.seconds) / steps,
        cpu_s=((steps - 1) * own_s * scenario.workers + last.cpu_s) / steps,
    )


def _server_s(scenario: Scenario, found: Sequence[LayerLoad], work: IterationWork) -> float:
    machine = scenario.machine
    compute_s = scenario.compute_s + work.device_s
    size = link_bytes(scenario)
    if scenario.servers:  # a shard answers its first chunk once it has all of it from each worker
        size += scenario.workers * max(load.chunk_bytes * load.wire_part for load in found)
    link_s = size / scenario.bytes_per_s + 2 * machine.latency_s
    if machine.cores >= 2:
        busy_s = max(work.worker_s, work.shard_s, work.serving_s)
    else:
        busy_s = max(work.worker_s + work.shard_s, work.serving_s) / _speed(machine)
    if scenario.wait_free:
        return norm(compute_s, link_s, busy_s)
    return compute_s + norm(link_s, busy_s)


def _ring_s(scenario: Scenario, found: Sequence[LayerLoad], work: IterationWork) -> float:
    machine = scenario.machine
    sizes = [load.dense_bytes for load in found]
    dealt = buckets(sizes, scenario.bucket_bytes)
    last = sum(sizes[layer] for layer in dealt[-1]) / sum(sizes)
    steps_s = 2 * (scenario.workers - 1) * (machine.latency_s + machine.ring_step_s)
    link_s = link_bytes(scenario) / (scenario.bytes_per_s * machine.ring_goodput)
    link_s += len(dealt) * steps_s
    busy_s, after_s = work.worker_s / _speed(machine), work.after_s / _speed(machine)
    if not scenario.wait_free:
        return scenario.compute_s + norm(link_s, busy_s) + after_s
    forward_s = scenario.compute_s * scenario.forward_part
    hidden = 1 - last
    backward_s = norm(scenario.compute_s - forward_s, hidden * link_s, hidden * busy_s)
    return forward_s + backward_s + last * norm(link_s, busy_s) + after_s


def _server_work(scenario: Scenario, found: Sequence[LayerLoad]) -> IterationWork:
    machine, p = scenario.machine, scenario.workers
    working, serving = parts(p, scenario.servers)
    dense, codec_s = sum(load.dense_bytes for load in found), sum(load.codec_s for load in found)
    messages_s = sum(load.messages for load in found) * machine.message_s
    sent = sum(load.dense_bytes * load.wire_part for load in found)
    wire_s = sent * machine.wire_s_per_byte + messages_s
    memory_s = sent * machine.memory_s_per_byte + messages_s

    def shard_s(own: float, from_others: float, in_memory: float) -> float:
        """Receive all gradients of a part of the model, add and apply them, send its values."""
        sums_s = dense * (p * scenario.sums * machine.sum_s_per_byte + machine.rule_s_per_byte)
        ends_s = 2 * (from_others * wire_s + in_memory * memory_s)
        return ends_s + own * (sums_s + (p + 1) * codec_s)

    to_others = working * (p - 1) + serving * scenario.servers
    worker_s = 2 * (to_others * wire_s + working * memory_s + codec_s)
    factors_s, device_s = _factor_work(scenario, found)
    return IterationWork(
        worker_s=worker_s + factors_s + sum(load.worker_s for load in found),
        shard_s=shard_s(working, working * (p - 1), working),
        serving_s=shard_s(serving, serving * p, 0.0),
        device_s=device_s,
    )


def _factor_work(scenario: Scenario, found: Sequence[LayerLoad]) -> tuple[float, float]:
    """Return the seconds of a core and of the accelerator for weights that travel as factors."""
    machine, others = scenario.machine, scenario.workers - 1
    core_s = device_s = 0.0
    for factors in (load.factors for load in found if load.factors is not None):
        ends_s = factors.link_bytes * machine.wire_s_per_byte + others * machine.message_s
        core_s += 2 * ends_s
        product_s = factors.products / machine.flops
        rule_s = machine.factors_s_per_byte * factors.weight_bytes
        if machine.products_on_device:  # the own gradient is a part of the net's computation
            device_s += product_s * others / scenario.workers + rule_s
        else:
            core_s += product_s + rule_s
    return core_s, device_s


def _ring_work(scenario: Scenario, found: Sequence[LayerLoad]) -> IterationWork:
    machine = scenario.machine
    dense = sum(load.dense_bytes for load in found)
    return IterationWork(
        worker_s=link_bytes(scenario) * machine.ring_s_per_byte
        + dense * machine.memory_s_per_byte
        + 2 * sum(load.codec_s for load in found),
        after_s=dense * machine.optimizer_s_per_byte,
    )


def _speed(machine: Machine) -> float:
    """Return the part of a core that a process gets."""
    return min(1.0, machine.cores)


def norm(*seconds: float) -> float:
    greatest = max(seconds)
    if not greatest:
        return 0.0
    shares = sum((each / greatest) ** EXPONENT for each in seconds)
    return float(greatest * shares ** (1 / EXPONENT))


def auto_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario, with any exchange, with the schemes that `--exchange=auto` takes."""
    choices = choices_of_weights(replace(scenario, exchange=PlannedExchange.HYBRID))
    rows = [(scenario.layers[layer].rows or scenario.batch) for layer in choices]
    found = fastest_schemes(list(choices.values()), rows, scenario.workers, _rates(scenario))
    factors = (
        layer for layer, scheme in zip(choices, found, strict=True) if scheme is Scheme.FACTORS
    )
    ring = Scheme.ALLREDUCE in found
    return replace(
        scenario,
        exchange=PlannedExchange.RING if ring else PlannedExchange.PS,
        servers=0 if ring else scenario.servers,
        by_factors=frozenset(factors),
    )


def _rates(scenario: Scenario) -> Rates:
    """Return the rates that the measurement before training would find:
    everything is exchanged, and nothing computed.
    """
    machine = scenario.machine
    size = ELEMENT_BYTES * elements(scenario.layers)
    bare = replace(scenario, compute_s=0.0, wait_free=False, by_factors=frozenset())
    server_s = predict(replace(bare, exchange=PlannedExchange.PS)) / size
    link_bytes = server_bytes(elements(scenario.layers), topology_of(scenario)) / size
    ring_s = predict(replace(bare, exchange=PlannedExchange.RING, servers=0))
    speed = min(1.0, machine.cores)
    return Rates(
        server_s=0.0,
        server_s_per_byte=server_s,
        allreduce_s=0.0,
        allreduce_s_per_byte=ring_s / size,
        link_s_per_byte=server_s / link_bytes,
        product_s_per_flop=1 / (machine.flops * speed),
        update_s_per_byte=machine.factors_s_per_byte / speed,
    )
