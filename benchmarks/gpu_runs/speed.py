"""One worker through the shards beside plain torch, by turns on one device: images or tokens a
second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_runs.checks import autocast
from benchmarks.gpu_runs.jobs import lone_worker, shard_process
from benchmarks.gpu_runs.nets import DeviceNet
from benchmarks.testbed.tables import Table
from poseidon.engine.worker_context import WorkerContext
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.distribute import join
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD

RATE, MOMENTUM, DECAY = 1e-4, 0.9, 5e-4
WARM = 3
PLAIN = "torch"
HEAD = ("net", "unit", "system", "per second", "spread", "of torch", "memory, MB")
READING = (
    "'per second' is the median over the rounds, 'spread' how far the rounds lie apart. 'of "
    "torch' is the median of each "
    "round's ratio to plain torch in the same round; the goal is 0.95. With one worker every "
    "tensor goes to the shard, a "
    "process of the same host: its gradient is copied to pinned memory, the shard applies SGD, "
    "and the value is copied back. The memory is the most that torch has allocated on the GPU for "
    "one iteration, beside the values of all systems."
)
Contestants = dict[str, "Contestant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEffort:
    """How much to measure.

    Attributes:
        rounds: of each system.
        iterations: in each round.
        mixed: forward passes run under autocast to bfloat16.
    """

    rounds: int = 7
    iterations: int = 20
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class System:
    """A way to train on one GPU.

    Attributes:
        options: of the exchange through one shard; None: without a shard, as one worker does by
            default.
    """

    name: str
    options: ExchangeOptions | None


@dataclass(slots=True, kw_only=True)
class Contestant:
    """One system that trains a net.

    Attributes:
        iterate: queues one iteration.
        finish: returns when all queued iterations have ended.
        per_s: units a second, by round.
        memory_bytes: the most memory that torch has allocated in a round; 0: not measured.
    """

    iterate: Callable[[], None]
    finish: Callable[[], None]
    per_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0


def exchanges() -> tuple[System, ...]:
    """Return the systems that are measured: `ps`, `hybrid`, and `auto` where there is one."""
    wanted = ("ps", "hybrid", "auto")
    kinds = [kind for kind in ExchangeKind if kind.value in wanted]
    return tuple(System(kind.value, ExchangeOptions(kind=kind)) for kind in kinds)


def measure_speed(
    nets: Sequence[DeviceNet],
    device: torch.device,
    effort: SpeedEffort,
    report: Callable[[str], None],
    systems: Sequence[System] = (),
) -> Table:
    """Measure nets one after the other, the systems of a net by turns.

    Args:
        systems: beside plain torch; none: `exchanges`.

    Raises:
        JobError: a shard does not start.
    """
    rows: list[tuple[str, ...]] = []
    facts: list[dict[str, Any]] = []
    for net in nets:
        report(f"{net.name}, batch {net.batch}")
        for name, contestant, ratios in _measure_net(net, device, effort, systems or exchanges()):
            median = statistics.median(contestant.per_s)
            spread = (max(contestant.per_s) - min(contestant.per_s)) / median
            ratio = statistics.median(ratios)
            memory = f"{contestant.memory_bytes / 1e6:.0f}" if contestant.memory_bytes else "-"
            rows.append(
                (net.name, net.unit, name, f"{median:.1f}", f"{spread:.0%}", f"{ratio:.2f}", memory)
            )
            facts.append(
                {
                    "net": net.name,
                    "batch": net.batch,
                    "unit": net.unit,
                    "system": name,
                    "per_s": contestant.per_s,
                    "median_per_s": median,
                    "of_torch": ratio,
                    "memory_bytes": contestant.memory_bytes,
                }
            )
            report(f"  {name}: {median:.1f} {net.unit}/s, {ratio:.2f} of torch")
    title = f"One worker on {device_name(device)}{', autocast to bfloat16' if effort.mixed else ''}"
    return Table(title=title, head=HEAD, rows=tuple(rows), reading=READING, facts=tuple(facts))


def device_name(device: torch.device) -> str:
    """Return the name of a device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


@contextmanager
def contestants(
    net: DeviceNet, device: torch.device, effort: SpeedEffort, systems: Sequence[System]
) -> Iterator[Contestants]:
    """Yield plain torch and these systems, each with a copy of the net."""
    with ExitStack() as stack:
        found = {PLAIN: _plain(net, device, effort)}
        for system in systems:
            found[system.name] = _ours(net, device, effort, system.options, stack)
        yield found


def _measure_net(
    net: DeviceNet, device: torch.device, effort: SpeedEffort, systems: Sequence[System]
) -> list[tuple[str, Contestant, list[float]]]:
    with contestants(net, device, effort, systems) as found:
        for contestant in found.values():
            _round_s(contestant, WARM)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                _round_s(contestant, 1)
                contestant.memory_bytes = torch.cuda.max_memory_allocated(device)
        for _ in range(effort.rounds):
            for contestant in found.values():
                seconds = _round_s(contestant, effort.iterations)
                contestant.per_s.append(net.units * effort.iterations / seconds)
        plain = found[PLAIN].per_s
        return [
            (name, one, [own / other for own, other in zip(one.per_s, plain, strict=True)])
            for name, one in found.items()
        ]


def _round_s(contestant: Contestant, iterations: int) -> float:
    contestant.finish()
    began_s = time.perf_counter()
    for _ in range(iterations):
        contestant.iterate()
    contestant.finish()
    return time.perf_counter() - began_s


def _module(net: DeviceNet, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return net.build().to(device)


def _forward_context(device: torch.device, effort: SpeedEffort) -> AbstractContextManager[object]:
    return autocast(device) if effort.mixed else nullcontext()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _plain(net: DeviceNet, device: torch.device, effort: SpeedEffort) -> Contestant:
    module = _module(net, device)
    x, target = (tensor.to(device) for tensor in net.example(net.batch))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)

    def iterate() -> None:
        optimizer.zero_grad()
        with _forward_context(device, effort):
            loss = module(x, target)
        loss.backward()
        optimizer.step()

    return Contestant(iterate=iterate, finish=lambda: _synchronize(device))


def _ours(
    net: DeviceNet,
    device: torch.device,
    effort: SpeedEffort,
    options: ExchangeOptions | None,
    stack: ExitStack,
) -> Contestant:
    module = _module(net, device)
    x, target = (tensor.to(device) for tensor in net.example(net.batch))
    context = WorkerContext(device=device)
    if options is not None:
        context = lone_worker(options, *stack.enter_context(shard_process()), device)
    rule = SGD(lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    group = stack.enter_context(join(module, rule, DistributeOptions(example=(x, target)), context))

    def iterate() -> None:
        module.zero_grad()
        with _forward_context(device, effort):
            loss = module(x, target)
        loss.backward()
        group.step()

    def finish() -> None:
        group.settle()
        _synchronize(device)

    return Contestant(iterate=iterate, finish=finish)
