"""The choice of `--exchange=auto` on a planned cluster: the job's own rule, with rates from the
formula. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from poseidon.exchange.auto.rates import Rates, fastest_schemes
from poseidon.exchange.cost import ELEMENT_BYTES, server_bytes
from poseidon.exchange.kinds import Scheme
from poseidon.observe.plan.iteration import predict
from poseidon.observe.plan.scenario import Exchange, Scenario, choices_of_weights, topology_of
from poseidon.observe.plan.shapes import elements


def auto_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario, with any exchange, with the schemes that `--exchange=auto` takes."""
    choices = choices_of_weights(replace(scenario, exchange=Exchange.HYBRID))
    rows = [(scenario.layers[layer].rows or scenario.batch) for layer in choices]
    found = fastest_schemes(list(choices.values()), rows, scenario.workers, _rates(scenario))
    factors = (
        layer for layer, scheme in zip(choices, found, strict=True) if scheme is Scheme.FACTORS
    )
    ring = Scheme.ALLREDUCE in found
    return replace(
        scenario,
        exchange=Exchange.RING if ring else Exchange.PS,
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
    server_s = predict(replace(bare, exchange=Exchange.PS)) / size
    link_bytes = server_bytes(elements(scenario.layers), topology_of(scenario)) / size
    ring_s = predict(replace(bare, exchange=Exchange.RING, servers=0))
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
