"""One worker's passes and what they set off, as events.

All hosts of a kind do the same at the same time, so one of each kind stands for all: a link outwards, a link inwards
and processors of a host that works, and of a host that only serves. A chunk stands for such a chunk on every shard: out
of a worker goes what its own shards do not hold, into a host goes what all others send to its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.agenda import Action, Agenda, Message, Outlet, Pipe, Urgency
from benchmarks.simulation.scenario import Factors, LayerLoad, Scenario, Way, buckets, loads, parts

ITERATIONS = 4
"""The first ones meet no values on their way; the last one is what is measured."""
QUANTUM_S = 0.002
"""Longer work on a processor lets other work in after so long, as an operating system does."""
MOST_PIECES = 128
"""A layer's bytes are sent in at most so many pieces; more would change nothing but the simulation's own time."""


class HostKind:
    """One host that stands for all that do the same."""

    def __init__(self, agenda: Agenda, scenario: Scenario) -> None:
        machine = scenario.machine
        buffer_s = machine.buffer_bytes / scenario.bytes_per_s
        self.out = Outlet(agenda, latency_s=machine.latency_s, buffer_s=buffer_s)
        self.into = Pipe()
        self.speed = min(machine.cores, 1.0)
        self.worker = Pipe()
        self.shard = Pipe() if machine.cores >= 2 else self.worker


@dataclass(frozen=True, slots=True)
class Home:
    """Where shards are, on one kind of host; all parts are of a chunk that every shard has one of.

    Attributes:
        name: of the kind.
        host: one that stands for all.
        part: what one host holds.
        of_worker: what one worker sends to other hosts of this kind, and gets back.
        of_shard: what one host gets from all workers on others, and sends back.
    """

    name: str
    host: HostKind
    part: float
    of_worker: float
    of_shard: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a layer's tensors on its way to the shards and back.

    Attributes:
        layer: whose.
        urgency: of its messages.
        size: bytes.
        messages: that it stands for.
    """

    layer: int
    urgency: Urgency
    size: float
    messages: float


class Simulation:
    """A job of a few iterations.

    Args:
        scenario: what to simulate.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._machine = scenario, scenario.machine
        self._loads: list[LayerLoad] = loads(scenario)
        self._agenda = Agenda()
        self._working = HostKind(self._agenda, scenario)
        self._homes = self._place()
        self._device = Pipe()
        self._fresh = [0] * len(self._loads)
        self._missing = [0] * len(self._loads)
        self._waiting: Action | None = None
        self._held: list[Action] = []
        self._iteration = 0
        self._buckets = buckets([load.dense_bytes for load in self._loads], scenario.bucket_bytes)
        self._buckets_left = 0
        self.begins_s: list[float] = []

    def run(self) -> None:
        """Simulate; `begins_s` then has the start of each iteration."""
        self._begin_iteration()
        self._agenda.run()

    def _place(self) -> list[Home]:
        p, servers = self._scenario.workers, self._scenario.servers
        part = parts(p, servers)
        homes = []
        if part.working and p > 1:
            others = part.working * (p - 1)
            homes.append(Home("workers", self._working, part=part.working, of_worker=others, of_shard=others))
        if part.serving:
            serving = HostKind(self._agenda, self._scenario)
            homes.append(
                Home(
                    "servers",
                    serving,
                    part=part.serving,
                    of_worker=part.serving * servers,
                    of_shard=part.serving * p,
                )
            )
        return homes

    # The passes.

    def _begin_iteration(self) -> None:
        self.begins_s.append(self._agenda.now_s)
        if len(self.begins_s) <= ITERATIONS:
            self._forward(0)

    def _forward(self, layer: int) -> None:
        if layer == len(self._loads):
            self._backward(layer - 1)
            return
        needed = range(len(self._fresh)) if self._waits_for_all else (layer,)
        if any(self._fresh[other] < self._iteration for other in needed):
            self._waiting = partial(self._forward, layer)
            return
        self._compute(self._loads[layer].forward_s, partial(self._forward, layer + 1))

    def _backward(self, layer: int) -> None:
        load = self._loads[layer]
        self._missing[layer] = self._count_missing(load)
        if load.factors is not None:
            self._when_free(partial(self._send_factors, layer, load.factors))
        self._compute(load.backward_s, partial(self._after_backward, layer))

    def _after_backward(self, layer: int) -> None:
        send = self._fill_bucket if self._scenario.way is Way.RING else self._push
        self._when_free(partial(send, layer))
        if self._loads[layer].factors is not None or not self._missing[layer]:
            self._arrived(layer)  # the weight itself is in use until now
        if layer:
            self._backward(layer - 1)
            return
        held, self._held = self._held, []
        for action in held:
            action()
        self._iteration += 1
        self._begin_iteration()

    @property
    def _waits_for_all(self) -> bool:
        return self._scenario.way is Way.RING or not self._scenario.wait_free

    def _when_free(self, action: Action) -> None:
        if self._scenario.wait_free:
            action()
        else:
            self._held.append(action)

    def _compute(self, work_s: float, then: Action) -> None:
        self._agenda.at(self._device.take(self._agenda.now_s, work_s), then)

    def _count_missing(self, load: LayerLoad) -> int:
        """What must arrive before the layer is fresh: chunks, factors made into a gradient, and its own release."""
        if self._scenario.way is Way.RING:
            return int(self._scenario.workers > 1)
        count = len(self._pieces(load.dense_bytes)) * len(self._homes)
        return count + 2 if load.factors is not None else count

    def _arrived(self, layer: int) -> None:
        self._missing[layer] -= 1
        if self._missing[layer] > 0:
            return
        self._fresh[layer] += 1
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting()

    # To the shards and back.

    def _push(self, layer: int) -> None:
        sizes = self._pieces(self._loads[layer].dense_bytes)
        for piece, size in enumerate(sizes):
            chunk = Chunk(
                layer=layer,
                urgency=(self._iteration, layer, piece),
                size=size,
                messages=self._loads[layer].messages / len(sizes),
            )
            for home in self._homes:
                self._push_chunk(home, chunk)

    def _push_chunk(self, home: Home, chunk: Chunk) -> None:
        self._send(
            self._working,
            f"worker to {home.name}",
            chunk.urgency,
            chunk.size * home.of_worker,
            (
                (home.host.into, self._wire_s(chunk.size * home.of_shard)),
                (self._working.worker, self._handling_s(chunk.size, chunk.messages, home.of_worker)),
                (home.host.shard, self._handling_s(chunk.size, chunk.messages, home.of_shard)),
            ),
            partial(self._sum, home, chunk),
        )

    def _sum(self, home: Home, chunk: Chunk) -> None:
        """A chunk of all workers is there: the shards add, apply the rule and answer."""
        per_byte = self._machine.sum_s_per_byte * self._scenario.workers + self._machine.rule_s_per_byte
        answer = partial(self._answer, home, chunk)
        self._process(home.host.shard, home.host, per_byte * chunk.size * home.part, answer)

    def _answer(self, home: Home, chunk: Chunk) -> None:
        self._send(
            home.host,
            f"shard of {home.name}",
            chunk.urgency,
            chunk.size * home.of_shard,
            (
                (self._working.into, self._wire_s(chunk.size * home.of_worker)),
                (home.host.shard, self._handling_s(chunk.size, chunk.messages, home.of_shard)),
                (self._working.worker, self._handling_s(chunk.size, chunk.messages, home.of_worker)),
            ),
            partial(self._arrived, chunk.layer),
        )

    # To the other workers.

    def _send_factors(self, layer: int, factors: Factors) -> None:
        sizes = self._pieces(factors.link_bytes)
        peers = self._scenario.workers - 1
        whole = _all(len(sizes), partial(self._multiply, layer, factors))
        for piece, size in enumerate(sizes):
            self._send(
                self._working,
                "factors",
                (self._iteration, layer, piece),
                size,
                (
                    (self._working.into, self._wire_s(size)),
                    (self._working.worker, 2 * self._handling_s(size, peers / len(sizes))),
                ),
                whole,
            )

    def _multiply(self, layer: int, factors: Factors) -> None:
        product_s = factors.products / self._machine.flops
        rule_s = self._machine.rule_s_per_byte * factors.weight_bytes
        then = partial(self._arrived, layer)
        if self._machine.products_on_device:
            # The worker's own gradient is part of the layer's compute time already, and is not made there.
            others = 1 - 1 / self._scenario.workers
            self._compute(product_s * others + rule_s, then)
        else:
            self._process(self._working.worker, self._working, product_s + rule_s, then)

    # Round the ring.

    def _fill_bucket(self, layer: int) -> None:
        """DDP sends its buckets in one order; a bucket goes when its last layer has its gradient."""
        number = next(n for n, bucket in enumerate(self._buckets) if layer in bucket)
        if layer != self._buckets[number][-1]:
            return
        if number == 0:
            self._buckets_left = len(self._buckets)
        p = self._scenario.workers
        if p == 1:
            return
        size = sum(self._loads[member].dense_bytes for member in self._buckets[number]) * 2 * (p - 1) / p
        steps_s = 2 * (p - 1) * (self._machine.latency_s + self._machine.ring_step_s)
        wire_s = self._wire_s(size) / self._machine.ring_goodput + steps_s
        handling_s = (
            2 * self._handling_s(size) + self._machine.sum_s_per_byte / self._working.speed * size / 2
        )
        self._working.out.send(
            Message(
                queue="ring",
                urgency=(self._iteration, number),
                out_s=wire_s,
                through=((self._working.into, wire_s), (self._working.worker, handling_s)),
                delivered=self._bucket_done,
            )
        )

    def _bucket_done(self) -> None:
        self._buckets_left -= 1
        if self._buckets_left:
            return
        total = sum(load.dense_bytes for load in self._loads)
        self._process(
            self._working.worker, self._working, self._machine.rule_s_per_byte * total, self._ring_done
        )

    def _ring_done(self) -> None:
        for layer in range(len(self._loads)):
            self._arrived(layer)

    # What takes time.

    def _send(
        self,
        host: HostKind,
        queue: str,
        urgency: Urgency,
        size: float,
        through: tuple[tuple[Pipe, float], ...],
        delivered: Action,
    ) -> None:
        used = tuple((pipe, work_s) for pipe, work_s in through if work_s > 0)
        host.out.send(
            Message(queue=queue, urgency=urgency, out_s=self._wire_s(size), through=used, delivered=delivered)
        )

    def _process(self, pipe: Pipe, host: HostKind, work_s: float, then: Action) -> None:
        """Work on a host's processor, in slices."""
        slice_s = min(work_s, QUANTUM_S)
        done_s = pipe.take(self._agenda.now_s, slice_s / host.speed)
        left_s = work_s - slice_s
        self._agenda.at(done_s, partial(self._process, pipe, host, left_s, then) if left_s > 0 else then)

    def _wire_s(self, size: float) -> float:
        return size / self._scenario.bytes_per_s

    def _handling_s(self, size: float, messages: float = 0.0, part: float = 1.0) -> float:
        """To make, or to take, a part of some messages of so many bytes together."""
        work_s = size * self._machine.wire_s_per_byte + messages * self._machine.message_s
        return part * work_s / self._working.speed

    def _pieces(self, size: float) -> list[float]:
        count = min(MOST_PIECES, math.ceil(size / self._scenario.chunk_bytes))
        return [size / count] * count if count else []


def _all(count: int, then: Action) -> Callable[[], None]:
    """An action that does `then` when it is called for the `count`th time."""
    left = [count]

    def one() -> None:
        left[0] -= 1
        if not left[0]:
            then()

    return one


def predict(scenario: Scenario) -> float:
    """Seconds of an iteration in the steady state."""
    simulation = Simulation(scenario)
    simulation.run()
    return simulation.begins_s[ITERATIONS] - simulation.begins_s[ITERATIONS - 1]
