"""Hosts, links and processors, and what it takes to use them.

All hosts of a kind do the same at the same time, so one of each kind stands for all: a link outwards, a link inwards
and processors of a host that works, and of a host that only serves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.event_queue import (
    Action,
    EventQueue,
    Message,
    OutgoingLink,
    SerialResource,
    Urgency,
)
from benchmarks.simulation.scenario import Scenario, parts

QUANTUM_S = 0.002
"""Longer work on a processor lets other work in after so long, as an operating system does."""
MOST_PIECES = 128
"""A layer's bytes are sent in at most so many pieces; more would change nothing but the simulation's own time."""


class HostKind:
    """One host that stands for all that do the same."""

    def __init__(self, events: EventQueue, scenario: Scenario) -> None:
        machine = scenario.machine
        buffer_s = machine.buffer_bytes / scenario.bytes_per_s
        self.out = OutgoingLink(events, latency_s=machine.latency_s, buffer_s=buffer_s)
        self.into = SerialResource()
        self.speed = min(machine.cores, 1.0)
        self.worker = SerialResource()
        self.shard = SerialResource() if machine.cores >= 2 else self.worker


@dataclass(frozen=True, slots=True)
class Home:
    """Where shards are, on one kind of host; all parts are of what is spread over all shards.

    Attributes:
        name: of the kind.
        host: one that stands for all.
        part: what one host holds.
        of_worker: what one worker sends to other hosts of this kind, and gets back.
        of_shard: what one host gets from all workers on others, and sends back.
        own: what a worker sends to the shards of its own host, and gets back: no link is used, but processors are.
        peers: how many workers on other hosts send to one of them.
    """

    name: str
    host: HostKind
    part: float
    of_worker: float
    of_shard: float
    own: float
    peers: int


class Cluster:
    """The machines of a scenario.

    Attributes:
        scenario: what is simulated.
        events: its time.
        working: a host that works.
        homes: the kinds of hosts that hold shards which a worker must send to.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.events = EventQueue()
        self.working = HostKind(self.events, scenario)
        self.homes = self._place()
        self._device = SerialResource()

    def _place(self) -> list[Home]:
        p, servers = self.scenario.workers, self.scenario.servers
        part = parts(p, servers)
        homes = []
        if part.working and p > 1:
            others = part.working * (p - 1)
            homes.append(
                Home(
                    "workers",
                    self.working,
                    part=part.working,
                    of_worker=others,
                    of_shard=others,
                    own=part.working,
                    peers=p - 1,
                )
            )
        if part.serving:
            serving = HostKind(self.events, self.scenario)
            of_worker, of_shard = part.serving * servers, part.serving * p
            homes.append(
                Home(
                    "servers",
                    serving,
                    part=part.serving,
                    of_worker=of_worker,
                    of_shard=of_shard,
                    own=0.0,
                    peers=p,
                )
            )
        return homes

    @property
    def processors_s(self) -> float:
        """For how long the processors of all hosts were at work, the mean."""
        homes = [(self.scenario.servers, home.host) for home in self.homes if home.host is not self.working]
        kinds = [(self.scenario.workers, self.working), *homes]
        resources = [
            (count, resource)
            for count, host in kinds
            for resource in dict.fromkeys((host.worker, host.shard))
        ]
        return sum(count * resource.work_s for count, resource in resources) / sum(
            count for count, _ in resources
        )

    def compute(self, work_s: float, then: Action) -> None:
        """Use a worker's accelerator."""
        self.events.at(self._device.take(self.events.now_s, work_s), then)

    def process(self, resource: SerialResource, host: HostKind, work_s: float, then: Action) -> None:
        """Use a processor of a host, a slice at a time."""
        slice_s = min(work_s, QUANTUM_S)
        done_s = resource.take(self.events.now_s, slice_s / host.speed)
        left_s = work_s - slice_s
        self.events.at(done_s, partial(self.process, resource, host, left_s, then) if left_s > 0 else then)

    def send(
        self,
        host: HostKind,
        queue: str,
        urgency: Urgency,
        out_s: float,
        through: tuple[tuple[SerialResource, float], ...],
        delivered: Action,
        least_s: float = 0.0,
        gives_way_to: str = "",
    ) -> None:
        """Use a host's link outwards, and what must work on the message besides."""
        used = tuple((resource, work_s) for resource, work_s in through if work_s > 0)
        host.out.send(
            Message(
                queue=queue,
                urgency=urgency,
                out_s=out_s,
                through=used,
                delivered=delivered,
                least_s=least_s,
                gives_way_to=gives_way_to,
            )
        )

    def wire_s(self, size: float) -> float:
        """How long so many bytes keep a link busy."""
        return size / self.scenario.bytes_per_s

    def handling_s(self, size: float, messages: float = 0.0, part: float = 1.0) -> float:
        """Return a processor's seconds to send or receive a part of some messages of `size` bytes together."""
        return part * self._handling_s(size * self.scenario.machine.wire_s_per_byte, messages)

    def passing_s(self, size: float, messages: float, part: float) -> float:
        """Return the same for a part that goes to a shard of the worker's own host."""
        return part * self._handling_s(size * self.scenario.machine.memory_s_per_byte, messages)

    def _handling_s(self, bytes_s: float, messages: float) -> float:
        return (bytes_s + messages * self.scenario.machine.message_s) / self.working.speed

    def pieces(self, size: float) -> list[float]:
        """Return the pieces of `size` bytes; none for none."""
        count = min(MOST_PIECES, math.ceil(size / self.scenario.piece_bytes))
        return [size / count] * count if count else []
