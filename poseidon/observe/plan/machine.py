"""The costs of a host: a core's times, which `costs.py` measures, and the host as a prediction
takes it to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreCosts:
    """A core's times for the work of an exchange, besides the net's own computation; the
    defaults are zero.

    Attributes:
        wire_s_per_byte: to send a byte by a socket, or to receive it.
        memory_s_per_byte: to copy a byte, as worker and shard of one host do, which share memory.
        message_s: to create a message, or to handle it, besides its bytes.
        sum_s_per_byte: to add a byte of gradient to a sum.
        rule_s_per_byte: to apply the update rule (SGD with momentum) to a byte of the model on a
            shard.
        factors_s_per_byte: the same for a byte of a weight updated from factors, without the
            products.
        optimizer_s_per_byte: the same with torch's optimizer, of a worker without shards.
        ring_s_per_byte: to send a byte round gloo's ring, to receive one and to add half of the
            time.
        half_s_per_byte: to convert a byte of float32 to 16 bits, or back.
        int8_s_per_byte: to encode a byte of float32 as int8, or to decode it: the mean, in a job.
        ring_half_s_per_byte: of DDP's fp16 hook for a byte of float32, besides a ring of half as
            many bytes.
        ring_low_rank_s_per_byte: of DDP's PowerSGD hook for a byte of a matrix, besides the next
            one.
        ring_low_rank_s_per_byte_and_rank: the same for each rank.
        low_rank_s_per_byte: of a worker for a byte of a matrix that travels as PowerSGD's factors,
            its rule included, besides the next one.
        low_rank_s_per_byte_and_rank: the same for each rank.
    """

    wire_s_per_byte: float = 0.0
    memory_s_per_byte: float = 0.0
    message_s: float = 0.0
    sum_s_per_byte: float = 0.0
    rule_s_per_byte: float = 0.0
    factors_s_per_byte: float = 0.0
    optimizer_s_per_byte: float = 0.0
    ring_s_per_byte: float = 0.0
    half_s_per_byte: float = 0.0
    int8_s_per_byte: float = 0.0
    ring_half_s_per_byte: float = 0.0
    ring_low_rank_s_per_byte: float = 0.0
    ring_low_rank_s_per_byte_and_rank: float = 0.0
    low_rank_s_per_byte: float = 0.0
    low_rank_s_per_byte_and_rank: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(CoreCosts):
    """A host, as the formula (`iteration.py`) and the simulation (`benchmarks/simulation`) take it.

    Attributes:
        goodput: the part of a link's rate that carries values and not headers.
        busy_goodput: the same if processors are always busy and send late; None: equal. For the
            simulation alone.
        cores: processors of a host for its costs; if fewer than 2, its worker and its shards share
            them.
        flops: floating-point operations a second of products of factors.
        products_on_device: products take the accelerator's time, not a core's.
        ring_step_s: the time of each of the 2 (P - 1) steps of a ring, besides its bytes and the
            latency.
        ring_goodput: the part of the remaining rate that a ring uses.
        buffer_bytes: bytes in flight between two hosts before a sender waits, for the simulation
            alone.
    """

    latency_s: float = 0.0
    goodput: float = 1.0
    busy_goodput: float | None = None
    cores: float = 2.0
    flops: float = math.inf
    products_on_device: bool = False
    ring_step_s: float = 0.0
    ring_goodput: float = 1.0
    buffer_bytes: int = MIB
