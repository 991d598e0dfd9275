"""The processor time of the exchange's work on this machine, in seconds of one core.

Processor time is measured, not wall-clock time, so that other work on the machine matters little.
Each figure is the median of several runs of the code that a job runs. Everything is measured under
load, as on a testbed whose hosts share this machine: arithmetic runs twice for each core, and
messages arrive one by one while every core multiplies for other processes. A message whose code and
memory are not in a cache takes five times as long as one in a row of messages. Links are the
testbed's: needs root.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.simulation.background_load import busy_cores
from benchmarks.simulation.products import INPUTS, OUTPUTS, RULE, Products
from benchmarks.simulation.streams import NO_LIMIT, carried, cpu_s_per_byte, ring_cpu_s_per_byte
from benchmarks.simulation.wire_probe import CHUNK_BYTES
from poseidon.observe.plan.shapes import Machine
from ps_server import Client, Server, Shard, StoreSpec, TableSpec, ZmqServerTransport
from ps_server.network import Network
from ps_server.rules import update

CHUNK = CHUNK_BYTES // 4
TRIES = 7
FEW, MANY = 8, 136
SET = 32
LARGE, LARGE_SET = 512 * 512 * 9, 8
"""Elements of a large convolution, and the number of such arrays that no cache holds."""
TABLES = 60
APART_S = 0.0008
"""Time between two messages, as in an iteration that messages limit; at four times this time
each costs half as much more.
"""
ROUTE_S = 50e-6
"""Latency between two namespaces of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one core.

    Attributes:
        flops: products of factors, floating-point operations a second.
        wire_s_per_byte: to send a byte, or to receive it.
        memory_s_per_byte: to write it to memory shared with another process, or to read it there.
        sum_s_per_byte: to add a byte of gradient to a sum.
        rule_s_per_byte: to apply SGD with momentum and decay to a byte of the model, chunk by
            chunk.
        factors_s_per_byte: the same for a byte of a weight updated from factors, without the
            products.
        optimizer_s_per_byte: the same with torch's optimizer.
        ring_s_per_byte: to send a byte round gloo's ring, and to receive one and add it.
        message_s: to create or to handle a message, of any size.
        cores: number of cores that all hosts share.
    """

    flops: float
    wire_s_per_byte: float
    memory_s_per_byte: float
    sum_s_per_byte: float
    rule_s_per_byte: float
    factors_s_per_byte: float
    optimizer_s_per_byte: float
    ring_s_per_byte: float
    message_s: float
    cores: int

    def __str__(self) -> str:
        return (
            f"products {self.flops / 1e9:.1f} Gflop/s, sums {1e-9 / self.sum_s_per_byte:.2f} GB/s, "
            f"rule {1e-9 / self.rule_s_per_byte:.2f} GB/s (by factors "
            f"{1e-9 / self.factors_s_per_byte:.2f}, torch's "
            f"{1e-9 / self.optimizer_s_per_byte:.2f}), gloo {1e-9 / self.ring_s_per_byte:.2f} "
            f"GB/s, sockets {1e-9 / self.wire_s_per_byte:.2f} GB/s, "
            f"memory {1e-9 / self.memory_s_per_byte:.2f} GB/s, "
            f"a message {1e6 * self.message_s:.0f} us, of a core; {self.cores} cores"
        )


def measure_costs() -> Costs:
    """Measure all costs; takes a minute.

    Raises:
        TestbedError: no hosts can be made here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few_s, many_s = (_under_load(partial(_factors_s, rows)) for rows in (FEW, MANY))
        sum_s, rule_s, copy_s, optimizer_s = (
            _under_load(work) for work in (_sum_s, _rule_s, _copy_s, _optimizer_s)
        )
        ring_s = ring_cpu_s_per_byte()
        with busy_cores():
            wire_s, message_s = cpu_s_per_byte(), _message_s()
    finally:
        torch.set_num_threads(threads)
    row_s = max(many_s - few_s, 1e-9) / (MANY - FEW)
    return Costs(
        flops=2.0 * OUTPUTS * INPUTS / row_s,
        wire_s_per_byte=wire_s,
        memory_s_per_byte=copy_s / CHUNK_BYTES,
        sum_s_per_byte=sum_s / CHUNK_BYTES,
        rule_s_per_byte=rule_s / CHUNK_BYTES,
        factors_s_per_byte=max(few_s - FEW * row_s, 0.0) / (OUTPUTS * INPUTS * 4),
        optimizer_s_per_byte=optimizer_s,
        ring_s_per_byte=ring_s,
        message_s=message_s,
        cores=os.cpu_count() or 1,
    )


def testbed_machine(costs: Costs, hosts: int, rate_mbit: float | None) -> Machine:
    """A host of a testbed whose hosts are all on one machine and share its processors.

    Args:
        costs: of that machine.
        hosts: number of hosts that share it.
        rate_mbit: rate of their links; None: as fast as the processors.
    """
    links = NO_LIMIT if rate_mbit is None else carried(hosts, rate_mbit)
    return Machine(
        latency_s=ROUTE_S,
        goodput=links.goodput,
        busy_goodput=links.busy_goodput,
        cores=costs.cores / hosts,
        flops=costs.flops,
        wire_s_per_byte=costs.wire_s_per_byte + links.interrupts_s_per_byte,
        memory_s_per_byte=costs.memory_s_per_byte,
        sum_s_per_byte=costs.sum_s_per_byte,
        rule_s_per_byte=costs.rule_s_per_byte,
        factors_s_per_byte=costs.factors_s_per_byte,
        optimizer_s_per_byte=costs.optimizer_s_per_byte,
        ring_s_per_byte=costs.ring_s_per_byte + 2 * links.interrupts_s_per_byte,
        message_s=costs.message_s,
    )


def _factors_s(rows: int) -> float:
    return _median_s(Products(rows).apply)


def _sum_s() -> float:
    """Return the seconds for a chunk."""
    return _chunk_s(2, torch.Tensor.add_)


def _rule_s() -> float:
    """Return the seconds for a chunk."""

    def apply(value: torch.Tensor, gradient: torch.Tensor, history: torch.Tensor) -> None:
        update(RULE, gradient, [history], value, rate=0.01, step=0)

    return _chunk_s(3, apply)


def _optimizer_s() -> float:
    """Return the seconds for a byte."""
    parameters = [torch.nn.Parameter(torch.zeros(LARGE)) for _ in range(LARGE_SET)]
    for parameter in parameters:
        parameter.grad = torch.zeros(LARGE)
    optimizer = torch.optim.SGD(
        parameters, lr=0.01, momentum=RULE.momentum, weight_decay=RULE.decay
    )
    return _median_s(optimizer.step) / (LARGE_SET * LARGE * 4)


def _copy_s() -> float:
    """Return the seconds for a chunk."""
    return _chunk_s(2, lambda there, here: np.copyto(there.numpy(), here.numpy()))


def _chunk_s(count: int, work: Callable[..., object]) -> float:
    """Return the seconds of work on `count` arrays of a chunk's size, out of a set that no cache
    holds.
    """
    chunks = [[torch.zeros(CHUNK) for _ in range(count)] for _ in range(SET)]

    def work_on_all() -> None:
        for chunk in chunks:
            work(*chunk)

    return _median_s(work_on_all) / SET


def _message_s() -> float:
    """Return the seconds of one end to create or handle one small message of the store that
    arrives alone.
    """
    tables = tuple(TableSpec(name=str(index), size=16) for index in range(TABLES))
    store = StoreSpec(workers=1, shards=1, tables=tables)
    server = Server(Shard(0, 1, b""), ZmqServerTransport("tcp://127.0.0.1:0"))
    serving = threading.Thread(target=server.serve, name="calibrate-shard")
    serving.start()
    client = Client([server.address], Network(), store=store)
    try:
        arrays = [np.zeros(16, dtype=np.float32) for _ in tables]
        client.start(lambda table: [arrays[table]])

        def iterate() -> None:
            for table, array in enumerate(arrays):
                client.push(table, array)
                time.sleep(APART_S)
            client.clock()
            for table, array in enumerate(arrays):
                client.read(table, array)

        return _median_s(iterate, time.process_time) / (4 * TABLES)
    finally:
        client.close()
        server.stop()
        serving.join()


def _under_load(work: Callable[[], float]) -> float:
    """Return the mean of `work` when two of it share each core: they share caches and memory, as
    in jobs.
    """
    count = 2 * (os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as pool:
        return statistics.fmean(pool.map(lambda _: work(), range(count)))


def _median_s(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    work()
    seconds = []
    for _ in range(TRIES):
        began_s = clock()
        work()
        seconds.append(clock() - began_s)
    return statistics.median(seconds)
