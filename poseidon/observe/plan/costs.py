"""The processor time of the exchange's work on one host.

It runs on the host itself, started by its agent.

Its argument is a request, and it writes one answer: each is a line of JSON. `{"seconds": 6.0,
"clients": 1}` gives the fields of `HostCosts`.

Figures are processor time, measured while as many processes work as a job has on the host. These
share caches and memory, and a message finds neither its code nor its data in a cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from poseidon.cluster.host_probe import cores
from poseidon.exchange.cost import ELEMENT_BYTES
from poseidon.observe.plan import work
from poseidon.observe.plan.processes import Processes
from poseidon.observe.plan.scenario import WireCodec
from poseidon.observe.plan.shapes import CoreCosts
from poseidon.observe.plan.small_job import CHUNK_ELEMENTS, CHUNKS, SMALL_TABLES

ARITHMETIC = (
    *("copy_s_per_byte", "sum_s_per_byte", "rule_s_per_byte", "half_s_per_byte"),
    *("optimizer_s_per_byte", "few_rows_s", "many_rows_s"),
    *("low_rank_s", "high_rank_s"),
)
"""Functions of `work`."""
MOST_CLIENTS = 8
"""Clients of one host that are measured together; more need too much memory."""
ALL_REDUCES = 4
HOOKS = (None, 0, work.LOW, work.HIGH)
"""See `small_job.hooks_s_per_byte`."""
MOST_ITERATIONS = 20
ROUNDS = 5
FREE = 0.95
"""The part of the cores from which on all count as free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts(CoreCosts):
    """What a host can do. Each figure is of one core.

    Attributes:
        free_cores: those that other work on the host leaves.
        gpu: name of its first GPU that torch can use; empty: none.
        flops: floating-point operations a second of products of factors.
    """

    cores: int
    free_cores: float
    gpu: str
    flops: float


def measure_costs(seconds: float, clients: int = 1) -> HostCosts:
    """Measure all costs. The process must have one thread only.

    Args:
        seconds: how long it may take, about, on a host that does nothing else.
        clients: clients on this host, each with a worker and a shard.

    Raises:
        ProcessFailed: a process failed, or did not answer in time.
    """
    clients = min(clients, MOST_CLIENTS)
    each_s = seconds / (len(ARITHMETIC) + 8)
    own_cores = cores()
    with Processes(clients) as processes:
        everyone = (*processes.workers, *processes.shards)
        took: dict[str, float] = {}
        parts: list[float] = []
        for name in ARITHMETIC:
            answers = processes.ask(everyone, "arithmetic", name, each_s)
            took[name] = statistics.fmean(seconds for seconds, _ in answers)
            parts.append(sum(part for _, part in answers) / min(own_cores, len(answers)))
        ring = _ring_costs(processes)
        wire_s, message_s, int8_s = _store_s(
            processes, clients, each_s, took["sum_s_per_byte"], took["rule_s_per_byte"]
        )
    free = statistics.median(parts)
    flops, factors_s = work.products(took["few_rows_s"], took["many_rows_s"])
    low_rank_s, rank_s = work.of_ranks(took["low_rank_s"], took["high_rank_s"])
    return HostCosts(
        cores=own_cores,
        free_cores=own_cores if free > FREE else own_cores * free,
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        flops=flops,
        factors_s_per_byte=factors_s,
        wire_s_per_byte=wire_s,
        memory_s_per_byte=took["copy_s_per_byte"],
        message_s=message_s,
        int8_s_per_byte=int8_s,
        **ring,
        low_rank_s_per_byte=low_rank_s,
        low_rank_s_per_byte_and_rank=rank_s,
        **{entry.name: took[entry.name] for entry in fields(HostCosts) if entry.name in took},
    )


def _ring_costs(processes: Processes) -> dict[str, float]:
    """Return the costs of a ring among the workers, and of DDP's hooks; of one client its shard
    is the other rank.
    """
    several = len(processes.workers) > 1
    ranks = processes.workers if several else (*processes.workers, *processes.shards)
    with tempfile.TemporaryDirectory() as folder:
        of_ring = processes.ask(
            ranks, "all_reduce", str(Path(folder) / "ranks"), len(ranks), ALL_REDUCES
        )
        of_hooks = processes.ask(
            ranks, "hooks", str(Path(folder) / "hooks"), len(ranks), HOOKS, ALL_REDUCES
        )
    ring_s = statistics.fmean(of_ring)
    plain_s, half_s, low_s, high_s = (
        statistics.fmean(column) for column in zip(*of_hooks, strict=True)
    )
    # of a byte of gradient that travels as float32
    round_s = ring_s * 2 * (len(ranks) - 1) / len(ranks)
    rank_s = max(0.0, high_s - low_s) / (work.HIGH - work.LOW)
    return {
        "ring_s_per_byte": ring_s,
        "ring_half_s_per_byte": max(0.0, half_s - plain_s + round_s / 2),
        "ring_low_rank_s_per_byte": max(0.0, low_s - plain_s + round_s - work.LOW * rank_s),
        "ring_low_rank_s_per_byte_and_rank": rank_s,
    }


def _store_s(
    processes: Processes, clients: int, limit_s: float, sum_s: float, rule_s: float
) -> tuple[float, float, float]:
    """Return the seconds for a byte and for a message at one end of a socket, and to encode or
    decode a byte as int8.

    Args:
        limit_s: duration for each store, about.
        sum_s: seconds to add a byte of gradient to a sum.
        rule_s: seconds to apply the rule to a byte.
    """
    stores = ((0, False), (SMALL_TABLES, False), (0, True))
    for number, (small, int8) in enumerate(stores):
        processes.ask(
            processes.workers, "join", processes.ask(processes.shards, "serve"), small, int8
        )
        processes.ask(processes.workers, "iterate", number, 1)
    each_s = limit_s / ROUNDS
    rounds = [
        [_iteration_s(processes, store, each_s) for store in range(len(stores))]
        for _ in range(ROUNDS)
    ]
    processes.ask(processes.workers, "leave")
    processes.ask(processes.shards, "leave")
    large_s, mixed_s, int8_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    # every worker sends and receives so much, and every shard
    size = 4 * CHUNK_ELEMENTS * CHUNKS * clients
    message_s = max(0.0, mixed_s - large_s) / (4 * SMALL_TABLES)
    messages_s = 4 * CHUNKS * clients * message_s
    wire_s = max(0.0, large_s - size * sum_s - messages_s) / (4 * size)
    # A worker encodes and decodes all. A shard decodes all workers' bytes, applies the rule to its
    # own part and encodes it.
    rest_s = (
        size * (4 * wire_s * WireCodec.INT8.value / ELEMENT_BYTES + sum_s + rule_s / clients)
        + messages_s
    )
    return wire_s, message_s, max(0.0, int8_s - rest_s) / (size * (3 + 1 / clients))


def _iteration_s(processes: Processes, store: int, limit_s: float) -> float:
    """Return the processor seconds of a worker and a shard together for an iteration of a small
    job.
    """
    everyone = (*processes.workers, *processes.shards)
    before = processes.ask(everyone, "cpu_s")
    once_s = max(processes.ask(processes.workers, "iterate", store, 1))
    count = min(MOST_ITERATIONS, int(limit_s / once_s))
    processes.ask(processes.workers, "iterate", store, count)
    used_s: float = sum(processes.ask(everyone, "cpu_s")) - sum(before)
    return used_s / (len(processes.workers) * (count + 1))


def worst(costs: list[HostCosts]) -> HostCosts:
    """Return the costs of a host that is as slow as the slowest of these in
    everything: synchronous jobs wait for it.
    """
    slowest = {
        entry.name: max(getattr(cost, entry.name) for cost in costs) for entry in fields(CoreCosts)
    }
    gpus = [cost.gpu for cost in costs]
    return HostCosts(
        cores=min(cost.cores for cost in costs),
        free_cores=min(cost.free_cores for cost in costs),
        gpu=gpus[0] if all(gpus) else "",
        flops=min(cost.flops for cost in costs),
        **slowest,
    )


def main(arguments: list[str]) -> None:
    try:
        request = json.loads(arguments[0])
        answer: dict[str, object] = asdict(
            measure_costs(float(request["seconds"]), int(request["clients"]))
        )
    except Exception as error:  # noqa: BLE001 - the program's outermost frame: the other side raises the error
        answer = {"problem": f"its processors cannot be measured: {error}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
