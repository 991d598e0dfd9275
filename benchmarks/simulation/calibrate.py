"""What this machine's processors take for the exchange's own work, measured in seconds of a core.

Processor time and not the clock's, so that other work on the machine spoils little. Each figure is the median of
several tries of the very code that a job runs, on all cores at once. Links are those of the testbed: needs root.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.simulation.scenario import Machine
from benchmarks.simulation.wire_probe import CHUNK_BYTES
from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.processes import Processes
from poseidon.exchange.factors import Scratch, apply_factors
from ps_server import Client, Rule, Server, Shard, StoreSpec, TableSpec, ZmqServerTransport
from ps_server.rules import update

RULE = Rule(momentum=0.9, decay=0.0005)
CHUNK = CHUNK_BYTES // 4
TRIES = 7
OUTPUTS, INPUTS = 2048, 4096
FEW, MANY = 8, 136
SET = 32
TABLES = 200
MESSAGES = 300
PROBE_PORT = 9900
PROBE_LIMIT_S = 60.0
ROUTE_S = 50e-6
"""Between two namespaces of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one core.

    Attributes:
        flops: of the products of factors, a second.
        wire_s_per_byte: to send a byte, or to receive it.
        sum_s_per_byte: to add a byte of gradient to a sum.
        rule_s_per_byte: to apply SGD with momentum and decay to a byte of the model.
        message_s: to make or to take a message, whatever its size.
        cores: that all hosts share.
    """

    flops: float
    wire_s_per_byte: float
    sum_s_per_byte: float
    rule_s_per_byte: float
    message_s: float
    cores: int

    def __str__(self) -> str:
        return (
            f"products {self.flops / 1e9:.1f} Gflop/s, sums {1e-9 / self.sum_s_per_byte:.2f} GB/s, "
            f"rule {1e-9 / self.rule_s_per_byte:.2f} GB/s, sockets {1e-9 / self.wire_s_per_byte:.2f} GB/s, "
            f"a message {1e6 * self.message_s:.0f} us, of a core; {self.cores} cores"
        )


def measure_costs() -> Costs:
    """Measure; a few seconds.

    Raises:
        TestbedError: no hosts can be made here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few_s, many_s = (_on_all_cores(partial(_factors_s, rows)) for rows in (FEW, MANY))
        sum_s, rule_s = _on_all_cores(_sum_s), _on_all_cores(_rule_s)
    finally:
        torch.set_num_threads(threads)
    products = 2.0 * (MANY - FEW) * OUTPUTS * INPUTS
    return Costs(
        flops=products / max(many_s - few_s, 1e-9),
        wire_s_per_byte=_wire_s() / (2 * MESSAGES * CHUNK_BYTES),
        sum_s_per_byte=sum_s / CHUNK_BYTES,
        rule_s_per_byte=rule_s / CHUNK_BYTES,
        message_s=_message_s(),
        cores=os.cpu_count() or 1,
    )


def testbed_machine(costs: Costs, hosts: int) -> Machine:
    """A host of a testbed whose hosts are all on one machine and share its processors."""
    return Machine(
        latency_s=ROUTE_S,
        goodput=1.0,
        cores=costs.cores / hosts,
        flops=costs.flops,
        wire_s_per_byte=costs.wire_s_per_byte,
        sum_s_per_byte=costs.sum_s_per_byte,
        rule_s_per_byte=costs.rule_s_per_byte,
        message_s=costs.message_s,
    )


def _factors_s(rows: int) -> float:
    value, history = torch.zeros(OUTPUTS, INPUTS), torch.zeros(OUTPUTS, INPUTS)
    u, v = torch.randn(rows, OUTPUTS), torch.randn(rows, INPUTS)
    scratch = Scratch(torch.device("cpu"))
    return _median_s(
        lambda: apply_factors(RULE, u, v, value, [history], rate=0.01, step=0, scale=0.5, scratch=scratch)
    )


def _sum_s() -> float:
    """Of a chunk, out of a set that no cache holds."""
    chunks = [(torch.zeros(CHUNK), torch.zeros(CHUNK)) for _ in range(SET)]

    def add() -> None:
        for total, gradient in chunks:
            total.add_(gradient)

    return _median_s(add) / SET


def _rule_s() -> float:
    """Of a chunk, likewise."""
    chunks = [(torch.zeros(CHUNK), torch.zeros(CHUNK), torch.zeros(CHUNK)) for _ in range(SET)]

    def apply() -> None:
        for value, gradient, history in chunks:
            update(RULE, gradient, [history], value, rate=0.01, step=0)

    return _median_s(apply) / SET


def _wire_s() -> float:
    """Of both ends together, to send and to receive `MESSAGES` chunks between two hosts of a testbed."""
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        address = f"tcp://{hosts[0].address}:{PROBE_PORT}"
        for role, host in (("receive", hosts[0]), ("send", hosts[1])):
            words = (sys.executable, "-m", "benchmarks.simulation.wire_probe", role, address, str(MESSAGES))
            processes.start(role, words, host=host)
        processes.await_end(PROBE_LIMIT_S)
        processes.check()
        return sum(_said_s(processes.said(role)) for role in ("receive", "send"))


def _message_s() -> float:
    """Of one end, to make or to take one small message of the store."""
    tables = tuple(TableSpec(name=str(index), size=16) for index in range(TABLES))
    store = StoreSpec(workers=1, shards=1, tables=tables)
    server = Server(Shard(0, 1, b""), ZmqServerTransport("tcp://127.0.0.1:0"))
    serving = threading.Thread(target=server.serve, name="calibrate-shard")
    serving.start()
    client = Client([server.address], rank=0, store=store)
    try:
        arrays = [np.zeros(16, dtype=np.float32) for _ in tables]
        client.start(lambda table: [arrays[table]])

        def iterate() -> None:
            for table, array in enumerate(arrays):
                client.push(table, array)
            client.clock()
            for table, array in enumerate(arrays):
                client.read(table, array)

        return _median_s(iterate, time.process_time) / (4 * TABLES)
    finally:
        client.close()
        server.stop()
        serving.join()


def _said_s(lines: list[str]) -> float:
    if not lines:
        raise TestbedError(f"the probe of the links said nothing within {PROBE_LIMIT_S:g} s")
    return float(json.loads(lines[-1])["cpu_s"])


def _on_all_cores(work: Callable[[], float]) -> float:
    """What each core takes when all work, the mean: they share caches and memory, in jobs as well."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return statistics.fmean(pool.map(lambda _: work(), range(os.cpu_count() or 1)))


def _median_s(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    work()
    seconds = []
    for _ in range(TRIES):
        began_s = clock()
        work()
        seconds.append(clock() - began_s)
    return statistics.median(seconds)
