"""What is to be predicted: a net, hosts, links, a way to exchange.

Law: values only. Which tensor takes which way is decided by Poseidon's own cost rule, from the same values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from benchmarks.testbed.shapes import LayerShape, shares_of_work
from poseidon.cluster.plan import best_loads
from poseidon.exchange.base import Trained
from poseidon.exchange.cost import ELEMENT_BYTES, ExchangeKind, Scheme, Topology, choose
from poseidon.exchange.pooled import FULL, SMALL
from ps_server.protocol.placement import SMALLEST_ELEMENTS, chunk_elements

MIB = 2**20


class Exchange(Enum):
    """How gradients meet."""

    PS = "ps"
    """Everything to the shards."""
    SVB = "svb"
    """Fully-connected weights as factors, the rest to the shards."""
    HYBRID = "hybrid"
    """The cheaper of both, tensor by tensor."""
    RING = "ring"
    """Ring all-reduce in buckets; the next pass begins when all is there, as with DDP."""


KIND_OF_EXCHANGE = {
    Exchange.PS: ExchangeKind.SERVER,
    Exchange.SVB: ExchangeKind.FACTORS,
    Exchange.HYBRID: ExchangeKind.HYBRID,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a host can do beside the net's own computation; the defaults cost nothing.

    Attributes:
        latency_s: from one host to another.
        goodput: part of a link's rate that carries values and not headers.
        busy_goodput: the same where processors are always busy, and late to send; None: no less.
        cores: processors of a host for all that follows; below 2, its worker and its shards share them.
        wire_s_per_byte: a core's time to send, or to receive, a byte.
        memory_s_per_byte: the same within a host, where worker and shard share memory.
        message_s: a core's time to make, or to take, a message beside its bytes.
        sum_s_per_byte: a core's time to add a byte of gradient to a sum.
        rule_s_per_byte: a core's time to apply the update rule to a byte of the model on a shard.
        factors_s_per_byte: the same for a byte of a weight that its factors change, beside the products.
        optimizer_s_per_byte: the same for the optimizer of a worker that does without shards.
        flops: of the products that make gradients of factors, a second.
        products_on_device: these take the accelerator's time, and not a core's.
        ring_s_per_byte: a core's time to send a byte round a ring, and to receive one and add it.
        ring_step_s: what each of the 2 (P - 1) steps of a ring takes beside its bytes and the latency.
        ring_goodput: part of what is left of the rate that a ring uses.
        buffer_bytes: on their way between two hosts before a sender waits.
    """

    latency_s: float = 0.0
    goodput: float = 1.0
    busy_goodput: float | None = None
    cores: float = 2.0
    wire_s_per_byte: float = 0.0
    memory_s_per_byte: float = 0.0
    message_s: float = 0.0
    sum_s_per_byte: float = 0.0
    rule_s_per_byte: float = 0.0
    factors_s_per_byte: float = 0.0
    optimizer_s_per_byte: float = 0.0
    flops: float = math.inf
    products_on_device: bool = False
    ring_s_per_byte: float = 0.0
    ring_step_s: float = 0.0
    ring_goodput: float = 1.0
    buffer_bytes: int = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One iteration to be predicted.

    Attributes:
        layers: the net, in forward order.
        batch: images of each worker.
        compute_s: one worker's forward and backward pass without any exchange.
        workers: P, hosts that work.
        servers: hosts beside them that only serve; the others' shards carry what makes all links alike.
        exchange: how gradients are exchanged.
        bits_per_s: of each link in each direction.
        wait_free: gradients leave while the backward pass still runs, and a layer waits for its own values only.
        machine: what a host can do.
        chunk_bytes: what one shard holds of a tensor in one piece; None: as a job's store cuts it.
        piece_bytes: what the simulation sends at a time; smaller is slower to simulate, and hardly better.
        bucket_bytes: of the ring.
        forward_part: of the compute time.
    """

    layers: tuple[LayerShape, ...]
    batch: int
    compute_s: float
    workers: int
    servers: int = 0
    exchange: Exchange = Exchange.HYBRID
    bits_per_s: float
    wait_free: bool = True
    machine: Machine = field(default_factory=Machine)
    chunk_bytes: int | None = None
    piece_bytes: int = 2 * MIB
    bucket_bytes: int = 25 * MIB
    forward_part: float = 1 / 3

    @property
    def bytes_per_s(self) -> float:
        """Of payload, over a link in one direction."""
        return self.bits_per_s / 8 * self.machine.goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """A weight that travels as factors.

    Attributes:
        link_bytes: out of each host, and into it: K (P - 1) (N + M) floats.
        products: floating point operations that make the gradient of all hosts' factors.
        weight_bytes: of the weight.
    """

    link_bytes: float
    products: float
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One layer: its time, and what it sends.

    Attributes:
        forward_s: of one worker.
        backward_s: of one worker.
        dense_bytes: of its tensors that go to shards, or round the ring.
        messages: that those take to the shards: one a chunk; small tensors share one.
        chunk_bytes: the largest chunk of them.
        factors: of its weight, where it travels so.
    """

    forward_s: float
    backward_s: float
    dense_bytes: int
    messages: float = 0.0
    chunk_bytes: int = 0
    factors: Factors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What part of the model the shards of each host hold.

    Attributes:
        working: of a host that works too.
        serving: of a host that only serves.
        servers: how many of the latter there are.
    """

    working: float
    serving: float
    servers: int


def parts(workers: int, servers: int) -> Parts:
    """As a job's plan deals them."""
    working, serving = best_loads(workers, servers)
    total = workers * working + servers * serving
    return Parts(working=working / total, serving=serving / total, servers=servers)


def loads(scenario: Scenario) -> list[LayerLoad]:
    """Every layer's time and bytes."""
    by_factors = _by_factors(scenario)
    shares = shares_of_work(scenario.layers)
    chunk = scenario.chunk_bytes or _chunk_bytes(scenario, by_factors)
    found = []
    for index, (layer, share) in enumerate(zip(scenario.layers, shares, strict=True)):
        compute_s = scenario.compute_s * share
        sizes = _dense_sizes(layer, index in by_factors)
        found.append(
            LayerLoad(
                forward_s=compute_s * scenario.forward_part,
                backward_s=compute_s * (1 - scenario.forward_part),
                dense_bytes=sum(sizes),
                messages=sum(_messages(size, chunk) for size in sizes),
                chunk_bytes=min(chunk, max(sizes, default=0)),
                factors=_factors(scenario, layer) if index in by_factors else None,
            )
        )
    return found


def _messages(size: int, chunk: int) -> float:
    """Of one tensor; a small one is a part of a pool's, which is as large as it may be."""
    small = size <= SMALL * ELEMENT_BYTES
    return size / min(chunk, FULL * ELEMENT_BYTES) if small else -(-size // chunk)


def _dense_sizes(layer: LayerShape, by_factors: bool) -> list[int]:
    """Bytes of each tensor that is not sent as factors."""
    dense = layer.tensors[1:] if by_factors else layer.tensors
    return [math.prod(shape) * ELEMENT_BYTES for shape in dense]


def _chunk_bytes(scenario: Scenario, by_factors: Collection[int]) -> int:
    """As `ps_server.protocol.placement` cuts: fewer, where there is less than a chunk a shard, down to what is worth a message."""
    part = parts(scenario.workers, scenario.servers)
    shards = (scenario.workers if part.working else 0) + (scenario.servers if part.serving else 0)
    total = sum(sum(_dense_sizes(layer, index in by_factors)) for index, layer in enumerate(scenario.layers))
    chunk = chunk_elements(total // ELEMENT_BYTES, shards) * ELEMENT_BYTES
    while chunk > SMALLEST_ELEMENTS * ELEMENT_BYTES and total < chunk * shards:
        chunk //= 2
    return chunk


def _by_factors(scenario: Scenario) -> frozenset[int]:
    """Return the layers whose weight travels as factors."""
    if scenario.exchange is Exchange.RING or scenario.workers == 1:
        return frozenset()
    working, serving = best_loads(scenario.workers, scenario.servers)
    topology = Topology(
        workers=scenario.workers,
        worker_loads=(working,) * scenario.workers,
        server_loads=(serving,) * scenario.servers,
    )
    weights = [_weight(layer, scenario.batch) for layer in scenario.layers]
    plan = choose(weights, KIND_OF_EXCHANGE[scenario.exchange], topology)
    return frozenset(plan.of(Scheme.FACTORS))


def _weight(layer: LayerShape, batch: int) -> Trained:
    return Trained(
        name=layer.name,
        tensor=nn.Parameter(torch.empty(layer.tensors[0], device="meta")),
        factor_rows=batch if layer.fully_connected else 0,
    )


def _factors(scenario: Scenario, layer: LayerShape) -> Factors:
    n, m = layer.tensors[0]
    rows = scenario.batch * scenario.workers
    return Factors(
        link_bytes=scenario.batch * (scenario.workers - 1) * (n + m) * ELEMENT_BYTES,
        products=2.0 * rows * n * m,
        weight_bytes=n * m * ELEMENT_BYTES,
    )


def link_bytes(scenario: Scenario) -> float:
    """Bytes that an iteration brings to the busiest link in one direction."""
    p, found = scenario.workers, loads(scenario)
    dense = sum(load.dense_bytes for load in found)
    if scenario.exchange is Exchange.RING:
        return dense * 2 * (p - 1) / p
    part = parts(p, scenario.servers)
    factors = sum(load.factors.link_bytes for load in found if load.factors is not None)
    working = dense * (1 + part.working * (p - 2)) + factors
    return max(working, dense * part.serving * p)


def buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Return the layers of each bucket, from the top of the net down, as DDP deals them: the first bucket is of 1 MiB."""
    found: list[tuple[int, ...]] = []
    mine: list[int] = []
    size = 0
    for index in reversed(range(len(sizes))):
        mine.append(index)
        size += sizes[index]
        if size >= (limit if found else min(MIB, limit)):
            found.append(tuple(mine))
            mine, size = [], 0
    return [*found, tuple(mine)] if mine else found
