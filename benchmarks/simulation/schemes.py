"""The schemes of a layer's gradient: chunks to the shards and back, factors to the other
workers, buckets round a ring.

Law: each scheme calls `arrived(layer)` as often as its `count` announces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.cluster import Cluster, Home
from benchmarks.simulation.event_queue import Action, SerialResource, Urgency
from poseidon.observe.plan.scenario import LayerLoad, PlannedFactors, buckets

Arrived = Callable[[int], None]
FACTORS = "factors"
"""The queue that a worker's pushes give way to (`exchange/server_exchange.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a layer's tensors that travels to the shards and back.

    It is spread over all shards. A worker sends what its own shards do not hold; a host receives
    what all others send to its shards. A shard answers a chunk only when it has the whole chunk
    from every worker, all over its one link: `alone` bytes from each.

    Attributes:
        layer: number of the layer.
        urgency: priority of its messages.
        size: bytes.
        messages: number of messages that it represents.
        alone: bytes of it that one shard has in one chunk.
        wire_part: the part of its bytes that is sent.
        codec_s: a core's time to encode it once, or to decode it.
    """

    layer: int
    urgency: Urgency
    size: float
    messages: float
    alone: float
    wire_part: float = 1.0
    codec_s: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes on the wire."""
        return self.size * self.wire_part


class ServerScheme:
    """Gradients to the shards, values back."""

    def __init__(self, cluster: Cluster, arrived: Arrived) -> None:
        self._cluster = cluster
        self._arrived = arrived

    def count(self, load: LayerLoad) -> int:
        """Return the number of values of a layer that will arrive."""
        return len(self._cluster.pieces(load.dense_bytes)) * len(self._cluster.homes)

    def send(self, iteration: int, layer: int, load: LayerLoad) -> None:
        """Send the gradient of a layer, which has just been computed."""
        cluster = self._cluster
        send = partial(self._send, iteration, layer, load)
        if load.worker_s:
            cluster.process(cluster.working.worker, cluster.working, load.worker_s, send)
        else:
            send()

    def _send(self, iteration: int, layer: int, load: LayerLoad) -> None:
        sizes = self._cluster.pieces(load.dense_bytes)
        for piece, size in enumerate(sizes):
            chunk = Chunk(
                layer=layer,
                urgency=(iteration, layer, piece),
                size=size,
                messages=load.messages / len(sizes),
                alone=min(load.chunk_bytes, size) * load.wire_part,
                wire_part=load.wire_part,
                codec_s=load.codec_s / len(sizes),
            )
            for home in self._cluster.homes:
                self._push(home, chunk)

    def _push(self, home: Home, chunk: Chunk) -> None:
        self._transfer(home, chunk, to_shard=True, then=partial(self._sum, home, chunk))

    def _sum(self, home: Home, chunk: Chunk) -> None:
        """Add the gradients of a chunk, apply the rule and answer: all workers' have arrived."""
        scenario = self._cluster.scenario
        per_byte = (
            scenario.machine.sum_s_per_byte * scenario.workers + scenario.machine.rule_s_per_byte
        )
        arrived = partial(self._arrived, chunk.layer)
        answer = partial(self._transfer, home, chunk, to_shard=False, then=arrived)
        # every gradient is decoded, the value encoded
        codec_s = chunk.codec_s * (scenario.workers + 1)
        work_s = (per_byte * chunk.size + codec_s) * home.part
        self._cluster.process(home.host.shard, home.host, work_s, answer)

    def _transfer(self, home: Home, chunk: Chunk, *, to_shard: bool, then: Action) -> None:
        """Send a chunk from all workers to the shards of a kind of host, or its values back."""
        cluster = self._cluster
        ends = (
            (f"worker to {home.name}", cluster.working, home.of_worker),
            (f"shard of {home.name}", home.host, home.of_shard),
        )
        (queue, source, sent), (_, target, received) = ends if to_shard else ends[::-1]
        cluster.send(
            source,
            queue,
            chunk.urgency,
            cluster.wire_s(chunk.sent * sent),
            ((target.into, cluster.wire_s(chunk.sent * received)), *self._handling(home, chunk)),
            then,
            least_s=cluster.wire_s(chunk.alone * home.peers),
            gives_way_to=FACTORS if to_shard else "",
        )

    def _handling(self, home: Home, chunk: Chunk) -> tuple[tuple[SerialResource, float], ...]:
        """Return the seconds of a chunk on the worker's and on the shard's processors, in either
        direction.
        """
        cluster = self._cluster
        codec_s = chunk.codec_s * (home.of_worker + home.own) / cluster.working.speed
        ends = (
            (cluster.working.worker, home.of_worker, codec_s),
            (home.host.shard, home.of_shard, 0.0),
        )
        return tuple(
            (
                resource,
                cluster.handling_s(chunk.sent, chunk.messages, part)
                + cluster.passing_s(chunk.sent, chunk.messages, home.own)
                + more_s,
            )
            for resource, part, more_s in ends
        )


class FactorScheme:
    """Factors to the other workers, which compute the gradient; one arrival a layer."""

    def __init__(self, cluster: Cluster, arrived: Arrived) -> None:
        self._cluster = cluster
        self._arrived = arrived

    def send(self, iteration: int, layer: int, factors: PlannedFactors) -> None:
        """Send the factors of a layer: the gradient of its output has just been computed."""
        cluster = self._cluster
        sizes = cluster.pieces(factors.link_bytes)
        messages = (cluster.scenario.workers - 1) / len(sizes)
        whole = _all(len(sizes), partial(self._multiply, layer, factors))
        for piece, size in enumerate(sizes):
            cluster.send(
                cluster.working,
                FACTORS,
                (iteration, layer, piece),
                cluster.wire_s(size),
                (
                    (cluster.working.into, cluster.wire_s(size)),
                    (cluster.working.worker, 2 * cluster.handling_s(size, messages)),
                ),
                whole,
            )

    def _multiply(self, layer: int, factors: PlannedFactors) -> None:
        cluster, machine = self._cluster, self._cluster.scenario.machine
        product_s = factors.products / machine.flops
        rule_s = machine.factors_s_per_byte * factors.weight_bytes
        then = partial(self._arrived, layer)
        if machine.products_on_device:
            # The worker's own gradient is part of the layer's compute time already, and is not made
            # there.
            others = 1 - 1 / cluster.scenario.workers
            cluster.compute(product_s * others + rule_s, then)
        else:
            cluster.process(cluster.working.worker, cluster.working, product_s + rule_s, then)


class RingScheme:
    """Buckets round a ring; DDP sends them in one order, each when the last of its layers has
    its gradient.

    Args:
        cluster: the hosts.
        loads: of all layers.
        arrived: called once for each layer, when the last bucket has been applied.
    """

    def __init__(self, cluster: Cluster, loads: Sequence[LayerLoad], arrived: Arrived) -> None:
        self._cluster = cluster
        self._arrived = arrived
        self._loads = loads
        self._sizes = [load.dense_bytes for load in loads]
        self._buckets = buckets(self._sizes, cluster.scenario.bucket_bytes)
        self._left = 0

    def send(self, iteration: int, layer: int) -> None:
        """Send the gradient of a layer, which has just been computed."""
        number = next(n for n, bucket in enumerate(self._buckets) if layer in bucket)
        if layer != self._buckets[number][-1]:
            return
        if number == 0:
            self._left = len(self._buckets)
        cluster, machine = self._cluster, self._cluster.scenario.machine
        p = cluster.scenario.workers
        dense = sum(self._sizes[member] for member in self._buckets[number])
        sent = sum(
            self._sizes[member] * self._loads[member].wire_part for member in self._buckets[number]
        )
        codec_s = 2 * sum(self._loads[member].codec_s for member in self._buckets[number])
        size = sent * 2 * (p - 1) / p
        steps_s = 2 * (p - 1) * (machine.latency_s + machine.ring_step_s)
        out_s = cluster.wire_s(size) / machine.ring_goodput + steps_s
        ring_s = machine.ring_s_per_byte * size / cluster.working.speed
        copy_s = cluster.passing_s(dense, 0.0, 1.0)  # into the bucket; gradients are views of it
        cluster.send(
            cluster.working,
            "ring",
            (iteration, number),
            out_s,
            (
                (cluster.working.into, out_s),
                (cluster.working.worker, ring_s + copy_s + codec_s / cluster.working.speed),
            ),
            self._bucket_done,
        )

    def _bucket_done(self) -> None:
        self._left -= 1
        if self._left:
            return
        rule_s = self._cluster.scenario.machine.optimizer_s_per_byte * sum(self._sizes)
        working = self._cluster.working
        self._cluster.process(working.worker, working, rule_s, self._all_done)

    def _all_done(self) -> None:
        for layer in range(len(self._sizes)):
            self._arrived(layer)


def _all(count: int, then: Action) -> Action:
    """Return an action that calls `then` when it is called for the `count`th time."""
    left = [count]

    def one() -> None:
        left[0] -= 1
        if not left[0]:
            then()

    return one
