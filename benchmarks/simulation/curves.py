"""Five nets on 8 to 1024 hosts: the efficiency of each exchange, and the fastest one.

Law: pure. The assumptions are the constants here; docs/internals/cluster_simulator.md names them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.simulation.simulator import simulate
from benchmarks.testbed.shapes import read_layers
from poseidon.observe.plan.scenario import PlannedExchange, Scenario
from poseidon.observe.plan.shapes import LayerShape, Machine, elements

HOSTS = (8, 16, 32, 64, 128, 256, 512, 1024)
GBIT_PER_S = (1, 10, 40, 100)
BATCH = 32
DEVICE_FLOPS = 10e12
"""Sustained rate of an accelerator in a training step, and in the products of factors."""
FLOPS_PER_MULTIPLICATION = 6
"""A multiplication and an addition in the forward pass, for the gradient of the input, and for the
gradient of the weight.
"""
MACHINE = Machine(
    latency_s=20e-6,
    goodput=0.94,
    flops=DEVICE_FLOPS,
    products_on_device=True,
    buffer_bytes=4 * 2**20,
)
"""TCP over frames of 1500 bytes leaves 94 % for values.

Shards and senders keep up with the links.
"""
NEAR = 0.02
"""Exchanges within this factor of the fastest count as equally fast."""

NETS: dict[str, str] = {
    "AlexNet": "alexnet/deploy.prototxt",
    "GoogLeNet": "googlenet/deploy.prototxt",
    "VGG-19": "vgg/vgg19_deploy.prototxt",
    "ResNet-50": "resnet/resnet50_deploy.prototxt",
    "ResNet-152": "resnet/resnet152_deploy.prototxt",
}
"""Definitions under `prototxt/`."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve.

    Attributes:
        label: for people.
        exchange: how gradients are exchanged.
        with_servers: there are as many hosts that only serve as hosts with workers.
    """

    label: str
    exchange: PlannedExchange
    with_servers: bool = False


LINES = (
    Line("ps", PlannedExchange.PS),
    Line("svb", PlannedExchange.SVB),
    Line("hybrid", PlannedExchange.HYBRID),
    Line("ring", PlannedExchange.RING),
    Line("ps + servers", PlannedExchange.PS, with_servers=True),
    Line("hybrid + servers", PlannedExchange.HYBRID, with_servers=True),
)
ALIKE = LINES[:4]
"""Curves that need the same machines."""


@cache
def layers(net: str) -> tuple[LayerShape, ...]:
    """Return the layers of one of `NETS`."""
    return read_layers(NETS[net])


def compute_s(net: str) -> float:
    """Return the seconds of one worker's forward and backward pass of a batch."""
    work = sum(layer.work for layer in layers(net))
    return BATCH * FLOPS_PER_MULTIPLICATION * work / DEVICE_FLOPS


def scenario(net: str, gbit_per_s: float, line: Line, hosts: int) -> Scenario:
    """Return the scenario of one point of a curve."""
    return Scenario(
        layers=layers(net),
        batch=BATCH,
        compute_s=compute_s(net),
        workers=hosts,
        servers=hosts if line.with_servers else 0,
        exchange=line.exchange,
        bits_per_s=gbit_per_s * 1e9,
        machine=MACHINE,
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One prediction.

    Attributes:
        net: one of `NETS`.
        gbit_per_s: rate of the links.
        label: label of the curve.
        hosts: number of hosts with workers.
        iteration_s: predicted seconds of an iteration.
        efficiency: speed-up over one host, divided by the number of hosts.
    """

    net: str
    gbit_per_s: float
    label: str
    hosts: int
    iteration_s: float
    efficiency: float


def points(
    nets: Sequence[str] = tuple(NETS),
    hosts_counts: Sequence[int] = HOSTS,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Point]:
    """Return all points of all curves."""
    for net in nets:
        alone_s = compute_s(net)
        for rate in GBIT_PER_S:
            report(f"{net} at {rate} Gbit/s")
            for line in LINES:
                for hosts in hosts_counts:
                    seconds = simulate(scenario(net, rate, line, hosts)).seconds
                    yield Point(net, rate, line.label, hosts, seconds, alone_s / seconds)


def winners(found: Sequence[Point]) -> list[tuple[int, tuple[str, ...]]]:
    """Return, for each number of hosts, the exchanges on the same machines that are as fast as
    the fastest.

    Args:
        found: the points of one net at one rate.
    """
    rows = []
    labels = [line.label for line in ALIKE]
    for hosts in sorted({point.hosts for point in found}):
        here = {point.label: point.iteration_s for point in found if point.hosts == hosts}
        fastest = min(here[label] for label in labels)
        near = tuple(label for label in labels if here[label] <= fastest * (1 + NEAR))
        rows.append((hosts, near))
    return rows


def in_ranges(rows: Sequence[tuple[int, tuple[str, ...]]]) -> str:
    """Return text such as `8-64: svb, hybrid; 128-1024: ps, hybrid`."""
    ranges: list[tuple[int, int, tuple[str, ...]]] = []
    for hosts, labels in rows:
        if ranges and ranges[-1][2] == labels:
            ranges[-1] = (ranges[-1][0], hosts, labels)
        else:
            ranges.append((hosts, hosts, labels))
    everything = tuple(line.label for line in ALIKE)
    return "; ".join(
        f"{first}{f'-{last}' if last > first else ''}: "
        f"{'all' if labels == everything else ', '.join(labels)}"
        for first, last, labels in ranges
    )


@dataclass(frozen=True, slots=True)
class NetFacts:
    """The facts that determine the curves of a net.

    Attributes:
        net: one of `NETS`.
        parameters: number of trained values.
        fully_connected: the part of them in weights with factors.
        compute_s: seconds of computation for a batch.
        factors_up_to: for each fully-connected layer the number of hosts up to which its factors
            are fewer bytes.
    """

    net: str
    parameters: int
    fully_connected: float
    compute_s: float
    factors_up_to: tuple[tuple[str, int], ...]


def facts(net: str) -> NetFacts:
    """Return the facts of one net."""
    weights = [layer for layer in layers(net) if layer.fully_connected]
    total = elements(layers(net))
    return NetFacts(
        net=net,
        parameters=total,
        fully_connected=sum(math.prod(layer.tensors[0]) for layer in weights) / total,
        compute_s=compute_s(net),
        factors_up_to=tuple((layer.name, _break_even(layer)) for layer in weights),
    )


def _break_even(layer: LayerShape) -> int:
    """Return the largest P with K P <= 2 N M / (N + M)."""
    n, m = layer.tensors[0]
    return 2 * n * m // (BATCH * (n + m))
