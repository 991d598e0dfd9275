"""The processor costs of a host, as a round example."""

from poseidon.observe.plan.costs import HostCosts

COSTS = HostCosts(
    cores=4,
    free_cores=4.0,
    gpu="",
    flops=1e10,
    factors_s_per_byte=1e-10,
    wire_s_per_byte=1e-9,
    memory_s_per_byte=1e-10,
    message_s=70e-6,
    sum_s_per_byte=1e-10,
    rule_s_per_byte=5e-10,
    optimizer_s_per_byte=5e-10,
    ring_s_per_byte=2e-9,
    half_s_per_byte=1e-10,
    int8_s_per_byte=6e-10,
    ring_half_s_per_byte=2e-10,
    ring_low_rank_s_per_byte=5e-10,
    ring_low_rank_s_per_byte_and_rank=2e-10,
    low_rank_s_per_byte=5e-10,
    low_rank_s_per_byte_and_rank=2e-10,
)
