"""Hosts, links and processors of a simulation.

All hosts of a kind do the same at the same time, so one host of each kind represents all: an
outgoing link, an incoming link and the processors of a host with a worker, and of a host that only
serves.
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
from poseidon.observe.plan.scenario import Scenario, parts

QUANTUM_S = 0.002
"""The time slice of a processor: longer work is preempted, as in an operating system."""
MOST_PIECES = 128
"""Most pieces of a layer's bytes; more would only make the simulation slower."""


class HostKind:
    """One host that represents all of its kind."""

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
    """The shards on one kind of host; all parts are fractions of what is spread over all shards.

    Attributes:
        name: name of the kind.
        host: the host that represents the kind.
        part: the part that one host holds.
        of_worker: the part that one worker sends to other hosts of this kind, and receives.
        of_shard: the part that one host receives from all workers on others, and sends.
        own: the part that a worker sends to the shards of its own host, and receives: it uses
            processors, but no link.
        peers: number of workers on other hosts that send to one of them.
    """

    name: str
    host: HostKind
    part: float
    of_worker: float
    of_shard: float
    own: float
    peers: int


class Cluster:
    """The hosts of a scenario.

    Attributes:
        scenario: the scenario.
        events: its event queue.
        working: a host with a worker.
        homes: the kinds of hosts with shards.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.events = EventQueue()
        self.working = HostKind(self.events, scenario)
        self.homes = self._place()
        self._device = SerialResource()

    def _place(self) -> list[Home]:
        p, servers = self.scenario.workers, self.scenario.servers
        of_workers, of_servers = parts(p, servers)
        homes = []
        if of_workers and p > 1:
            others = of_workers * (p - 1)
            homes.append(
                Home(
                    "workers",
                    self.working,
                    part=of_workers,
                    of_worker=others,
                    of_shard=others,
                    own=of_workers,
                    peers=p - 1,
                )
            )
        if of_servers:
            serving = HostKind(self.events, self.scenario)
            of_worker, of_shard = of_servers * servers, of_servers * p
            homes.append(
                Home(
                    "servers",
                    serving,
                    part=of_servers,
                    of_worker=of_worker,
                    of_shard=of_shard,
                    own=0.0,
                    peers=p,
                )
            )
        return homes

    @property
    def processors_s(self) -> float:
        """Mean busy time of the processors of all hosts."""
        resources = self._processors()
        return sum(count * resource.work_s for count, _, resource in resources) / sum(
            count for count, _, _ in resources
        )

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all hosts together."""
        return sum(
            count * host.speed * resource.work_s for count, host, resource in self._processors()
        )

    def _processors(self) -> list[tuple[int, HostKind, SerialResource]]:
        """Return the processors of each kind of host, with the number of its hosts."""
        homes = [
            (self.scenario.servers, home.host)
            for home in self.homes
            if home.host is not self.working
        ]
        kinds = [(self.scenario.workers, self.working), *homes]
        return [
            (count, host, resource)
            for count, host in kinds
            for resource in dict.fromkeys((host.worker, host.shard))
        ]

    def compute(self, work_s: float, then: Action) -> None:
        """Use a worker's accelerator."""
        self.events.at(self._device.take(self.events.now_s, work_s), then)

    def process(
        self, resource: SerialResource, host: HostKind, work_s: float, then: Action
    ) -> None:
        """Use a processor of a host, a slice at a time."""
        slice_s = min(work_s, QUANTUM_S)
        done_s = resource.take(self.events.now_s, slice_s / host.speed)
        left_s = work_s - slice_s
        self.events.at(
            done_s, partial(self.process, resource, host, left_s, then) if left_s > 0 else then
        )

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
        """Use a host's outgoing link, and the other resources that handle the message."""
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
        """Return how long a number of bytes keeps a link busy."""
        return size / self.scenario.bytes_per_s

    def handling_s(self, size: float, messages: float = 0.0, part: float = 1.0) -> float:
        """Return a processor's seconds to send or receive a part of some messages of `size`
        bytes together.
        """
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
