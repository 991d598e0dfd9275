"""The processor costs of a host, as a round example."""

from poseidon.plan.costs import HostCosts

COSTS = HostCosts(
    cores=4,
    gpu="",
    flops=1e10,
    factors_s_per_byte=1e-10,
    wire_s_per_byte=1e-9,
    memory_s_per_byte=1e-10,
    sum_s_per_byte=1e-10,
    rule_s_per_byte=5e-10,
    half_s_per_byte=1e-10,
)
