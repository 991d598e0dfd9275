"""A scenario to predict: a net, hosts, links, an exchange.

Law: values only. Poseidon's own cost rule decides the scheme of each tensor, from the same values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from poseidon.cluster.job_plan import best_loads
from poseidon.exchange.base import Trained
from poseidon.exchange.cost import ELEMENT_BYTES, Choice, Topology, choose
from poseidon.exchange.lossy import low_rank_matrix
from poseidon.exchange.options import ExchangeKind, Scheme
from poseidon.exchange.server.placed import POOL_ELEMENTS, SMALL_TENSOR_ELEMENTS
from poseidon.observe.plan.shapes import MIB, LayerShape, Machine, Shape, shares_of_work
from ps_server import CodecPair, Precision
from ps_server.codecs.blocks import Int8
from ps_server.protocol.placement import SMALLEST_ELEMENTS, UNEVEN, chunk_elements
from ps_server.protocol.settings import CHUNKS_A_SERVER, CHUNKS_A_SHARD
from ps_server.protocol.virtual_workers import VirtualWorkers


class PlannedExchange(Enum):
    """The exchange of gradients."""

    PS = "ps"
    """Everything to the shards."""
    SVB = "svb"
    """Fully-connected weights as factors, the rest to the shards."""
    HYBRID = "hybrid"
    """The cheaper of both, tensor by tensor."""
    RING = "ring"
    """Ring all-reduce in buckets; the next pass begins when all values have arrived, as with
    DDP.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLowRank:
    """PowerSGD: a gradient of n x m travels as r (n + m) values, if these are less than half."""

    rank: int


class WireCodec(Enum):
    """A lossy encoding of gradients and values on the wire, and its bytes for each value."""

    HALF = 2.0
    """float16 or bfloat16."""
    INT8 = 1.015625
    """A byte a value, and a scale of four bytes for each block of 256 values."""


Lossy = PlannedLowRank | WireCodec

INT8 = CodecPair(Int8(), Int8())
KIND_OF_EXCHANGE = {
    PlannedExchange.PS: ExchangeKind.SERVER,
    PlannedExchange.SVB: ExchangeKind.FACTORS,
    PlannedExchange.HYBRID: ExchangeKind.HYBRID,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One iteration to predict.

    Attributes:
        layers: the net, in forward order.
        batch: images of each virtual worker.
        compute_s: one worker's forward and backward pass without any exchange.
        workers: P, the number of hosts with a worker.
        servers: number of hosts that only serve; the shards of the others carry as
            much as makes all links equally busy.
        bits_per_s: of each link in each direction.
        wait_free: gradients leave while the backward pass still runs, and a layer waits for its own
            values only.
        chunk_bytes: size of a chunk of a tensor; None: as in a job's store.
        piece_bytes: the simulation's unit of sending; smaller is slower to simulate, and hardly
            more exact.
        lossy: how tensors that go to shards or round the ring are encoded; None: as float32.
        local_steps: H, local steps of a round; 1: gradients are exchanged in every iteration.
        by_factors: the layers whose weight travels as factors; None: as the exchange chooses by
            bytes.
        virtual_workers: the job's virtual workers, and the workers that compute for them; None:
            each computes for one.
    """

    layers: tuple[LayerShape, ...]
    batch: int
    compute_s: float
    workers: int
    servers: int = 0
    exchange: PlannedExchange = PlannedExchange.HYBRID
    bits_per_s: float
    wait_free: bool = True
    machine: Machine = field(default_factory=Machine)
    chunk_bytes: int | None = None
    piece_bytes: int = 2 * MIB
    bucket_bytes: int = 25 * MIB
    forward_part: float = 1 / 3
    lossy: Lossy | None = None
    local_steps: int = 1
    by_factors: frozenset[int] | None = None
    virtual_workers: VirtualWorkers | None = None

    @property
    def turns(self) -> int:
        """The most virtual workers that one worker computes for."""
        virtual = self.virtual_workers
        if virtual is None:
            return 1
        return max(len(virtual.of(worker)) for worker in range(virtual.processes))

    @property
    def sums(self) -> int:
        """The most sums of one tensor's gradients that a worker sends."""
        virtual = self.virtual_workers
        if virtual is None:
            return 1
        return max(len(virtual.nodes(worker)) for worker in range(virtual.processes))

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes a second, over a link in one direction."""
        return self.bits_per_s / 8 * self.machine.goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFactors:
    """A weight that travels as factors.

    Attributes:
        link_bytes: out of each host, and into it: K (P - 1) (N + M) floats.
        products: floating-point operations of the gradient from all hosts' factors.
    """

    link_bytes: float
    products: float
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """The load of one layer: its time, and its bytes.

    Attributes:
        dense_bytes: size of its tensors that go to shards, or round the ring; of a matrix that
            PowerSGD sends to shards the size of both factors.
        messages: their messages to the shards: one a chunk; small tensors share one.
        chunk_bytes: their largest chunk.
        factors: the factors of its weight, if it travels so.
        wire_part: the part of `dense_bytes` that is sent.
        codec_s: a core's time to encode the dense tensors once, or to decode them.
        worker_s: a core's time of the worker before the dense tensors leave.
    """

    forward_s: float
    backward_s: float
    dense_bytes: int
    messages: float = 0.0
    chunk_bytes: int = 0
    factors: PlannedFactors | None = None
    wire_part: float = 1.0
    codec_s: float = 0.0
    worker_s: float = 0.0


def parts(workers: int, servers: int) -> tuple[float, float]:
    """Return the part of the model that the shards of a host with a worker hold, and the shards of
    one that only serves, as in a job's plan.
    """
    working, serving = best_loads(workers, servers)
    total = workers * working + servers * serving
    return working / total, serving / total


def loads(scenario: Scenario) -> list[LayerLoad]:
    """Return every layer's time and bytes."""
    by_factors = _by_factors(scenario)
    shares = shares_of_work(scenario.layers)
    chunk = scenario.chunk_bytes or _chunk_bytes(scenario, by_factors)
    found = []
    for index, (layer, share) in enumerate(zip(scenario.layers, shares, strict=True)):
        compute_s = scenario.compute_s * share
        tables = _tables(scenario, layer, index in by_factors)
        dense = sum(table.size for table in tables)
        wire_part, codec_s = _encoded(scenario, layer, index in by_factors, dense)
        found.append(
            LayerLoad(
                forward_s=compute_s * scenario.forward_part,
                backward_s=compute_s * (1 - scenario.forward_part),
                dense_bytes=dense,
                messages=sum(_messages(table, chunk) for table in tables),
                chunk_bytes=min(chunk, max((table.size for table in tables), default=0)),
                factors=_factors(scenario, layer) if index in by_factors else None,
                wire_part=wire_part,
                codec_s=codec_s,
                worker_s=_low_rank_s(scenario, layer, index in by_factors)
                if _factors_to_shards(scenario)
                else 0.0,
            )
        )
    return found


def _encoded(
    scenario: Scenario, layer: LayerShape, by_factors: bool, dense: int
) -> tuple[float, float]:
    """Return the part of a layer's dense bytes that is sent, and a core's seconds to encode them
    once, or to decode.
    """
    machine = scenario.machine
    if scenario.lossy is None or not dense or _factors_to_shards(scenario):
        return 1.0, 0.0
    if isinstance(scenario.lossy, WireCodec):
        if scenario.exchange is PlannedExchange.RING:
            per_byte = machine.ring_half_s_per_byte / 2
        else:
            half = scenario.lossy is WireCodec.HALF
            per_byte = machine.half_s_per_byte if half else machine.int8_s_per_byte
        return scenario.lossy.value / ELEMENT_BYTES, per_byte * dense
    rank = scenario.lossy.rank
    sent = sum(low_rank_elements(shape, rank) for shape in layer.tensors) * ELEMENT_BYTES
    return sent / dense, _low_rank_s(scenario, layer, by_factors) / 2


def _factors_to_shards(scenario: Scenario) -> int:
    """Return the rank of PowerSGD through the shards; 0: it is not used."""
    through_shards = scenario.exchange is not PlannedExchange.RING
    return (
        scenario.lossy.rank if through_shards and isinstance(scenario.lossy, PlannedLowRank) else 0
    )


def _low_rank_s(scenario: Scenario, layer: LayerShape, by_factors: bool) -> float:
    """Return a core's seconds of a worker for PowerSGD: both factors, their product; through the
    shards the rule.
    """
    assert isinstance(scenario.lossy, PlannedLowRank)
    rank, machine = scenario.lossy.rank, scenario.machine
    shapes = _dense_shapes(layer, by_factors)
    size = ELEMENT_BYTES * sum(math.prod(shape) for shape in shapes if _is_low_rank(shape, rank))
    if scenario.exchange is PlannedExchange.RING:
        return size * (
            machine.ring_low_rank_s_per_byte + rank * machine.ring_low_rank_s_per_byte_and_rank
        )
    return size * (machine.low_rank_s_per_byte + rank * machine.low_rank_s_per_byte_and_rank)


def _is_low_rank(shape: Shape, rank: int) -> bool:
    return low_rank_elements(shape, rank) < math.prod(shape)


def low_rank_elements(shape: Shape, rank: int) -> int:
    """Return the values that PowerSGD sends of one tensor: r (n + m), or all if those are not
    less than half.
    """
    n, m = math.prod(shape[:1]), math.prod(shape[1:])
    factors = min(n, m, rank) * (n + m)
    return factors if 2 * factors < n * m else n * m


@dataclass(frozen=True, slots=True)
class _PlannedTable:
    """A table of the store: a tensor that is not sent as factors of a batch, or one of
    PowerSGD's factors.

    Attributes:
        size: bytes.
        pooled: a small tensor, which shares a table with others.
    """

    size: int
    pooled: bool


def _tables(scenario: Scenario, layer: LayerShape, by_factors: bool) -> list[_PlannedTable]:
    """Return the tables of a layer; of a matrix as PowerSGD's factors a table for each."""
    rank, tables = _factors_to_shards(scenario), list[_PlannedTable]()
    for shape in _dense_shapes(layer, by_factors):
        if rank and _is_low_rank(shape, rank):
            sides = (shape[0], math.prod(shape[1:]))
            tables += [_PlannedTable(ELEMENT_BYTES * rank * side, pooled=False) for side in sides]
        else:
            elements = math.prod(shape)
            tables.append(
                _PlannedTable(ELEMENT_BYTES * elements, pooled=elements <= SMALL_TENSOR_ELEMENTS)
            )
    return tables


def _messages(table: _PlannedTable, chunk: int) -> float:
    """Return the number of messages of one table; a small tensor counts as a part of a full
    pool's message.
    """
    if table.pooled:
        return table.size / min(chunk, POOL_ELEMENTS * ELEMENT_BYTES)
    return -(-table.size // chunk)


def _dense_shapes(layer: LayerShape, by_factors: bool) -> Sequence[Shape]:
    """Return the shapes of the tensors that are not sent as factors of a batch."""
    return layer.tensors[1:] if by_factors else layer.tensors


def _chunk_bytes(scenario: Scenario, by_factors: Collection[int]) -> int:
    """Return the chunk size of `ps_server.protocol.placement`: smaller if there is
    less than half a chunk a shard, down to a minimum.
    """
    working, serving = parts(scenario.workers, scenario.servers)
    shards = (scenario.workers if working else 0) + (scenario.servers if serving else 0)
    total = sum(
        table.size
        for index, layer in enumerate(scenario.layers)
        for table in _tables(scenario, layer, index in by_factors)
    )
    chunks = CHUNKS_A_SERVER if serving else CHUNKS_A_SHARD
    chunk = chunk_elements(total // ELEMENT_BYTES, shards, chunks) * ELEMENT_BYTES
    while chunk > SMALLEST_ELEMENTS * ELEMENT_BYTES and UNEVEN * total < chunk * shards:
        chunk //= 2
    return chunk


def _by_factors(scenario: Scenario) -> frozenset[int]:
    if scenario.by_factors is not None:
        return scenario.by_factors
    if (
        scenario.exchange is PlannedExchange.RING
        or scenario.workers == 1
        or scenario.local_steps > 1
    ):
        return frozenset()
    chosen = choices_of_weights(scenario).items()
    return frozenset(layer for layer, choice in chosen if choice.scheme is Scheme.FACTORS)


def topology_of(scenario: Scenario) -> Topology:
    """Return the hosts and the loads of their shards, by which a job's plan is made: with virtual
    workers a host for each of them.
    """
    if scenario.virtual_workers is not None:
        return Topology.colocated(scenario.virtual_workers.count)
    working, serving = best_loads(scenario.workers, scenario.servers)
    return Topology(
        worker_loads=(working,) * scenario.workers, server_loads=(serving,) * scenario.servers
    )


def choices_of_weights(scenario: Scenario) -> dict[int, Choice]:
    """Return the choice of Poseidon's rule for the weight of each trained layer.

    A ring has the choices of `hybrid`.
    """
    trained = [index for index, layer in enumerate(scenario.layers) if layer.tensors]
    weights = [_weight(scenario.layers[index], scenario.batch) for index in trained]
    kind = KIND_OF_EXCHANGE.get(scenario.exchange, ExchangeKind.HYBRID)
    precision = Precision.BFLOAT16 if scenario.lossy is WireCodec.HALF else Precision.FLOAT32
    plan = choose(
        weights,
        kind,
        topology_of(scenario),
        gradients=precision,
        values=precision,
        compressions=[_compression(scenario.lossy, weight) for weight in weights],
    )
    return dict(zip(trained, plan.choices, strict=True))


def _compression(
    lossy: Lossy | None, weight: Trained
) -> CodecPair | low_rank_matrix.LowRank | None:
    if lossy is WireCodec.INT8:
        return INT8
    low_rank = low_rank_matrix.LowRank(lossy.rank) if isinstance(lossy, PlannedLowRank) else None
    return low_rank if low_rank is not None and low_rank.fits(weight.tensor) else None


def _weight(layer: LayerShape, batch: int) -> Trained:
    return Trained(
        name=layer.name,
        tensor=nn.Parameter(torch.empty(layer.tensors[0], device="meta")),
        factor_rows=(layer.rows or batch) if layer.fully_connected else 0,
    )


def _factors(scenario: Scenario, layer: LayerShape) -> PlannedFactors:
    n, m = layer.tensors[0]
    own = (layer.rows or scenario.batch) * scenario.turns
    rows = own * scenario.workers
    return PlannedFactors(
        link_bytes=own * (scenario.workers - 1) * (n + m) * ELEMENT_BYTES,
        products=2.0 * rows * n * m,
        weight_bytes=n * m * ELEMENT_BYTES,
    )


def link_bytes(scenario: Scenario) -> float:
    """Return the bytes of an iteration on the busiest link in one direction; of local steps the
    mean of a round.
    """
    p, found = scenario.workers, loads(scenario)
    dense = sum(load.dense_bytes * load.wire_part for load in found) / scenario.local_steps
    factors = sum(load.factors.link_bytes for load in found if load.factors is not None)
    if scenario.exchange is PlannedExchange.RING:
        return dense * (scenario.sums + 1) * (p - 1) / p + factors
    (working, serving), sums = parts(p, scenario.servers), scenario.sums
    out = sums * (1 - working) + working * (p - 1)
    into = (1 - working) + sums * working * (p - 1)
    return max(dense * max(out, into) + factors, dense * sums * serving * p)


def buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Return the layers of each bucket, from the top of the net down, as DDP
    deals them: the first bucket is of 1 MiB.
    """
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
