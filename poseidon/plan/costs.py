"""The processor time of the exchange's work on one host. It runs on the host itself, sent by `poseidon plan`.

It reads one request from standard input and writes one answer, each a line of JSON: `{"seconds": 3.0}` gives the fields of
`HostCosts`. Figures are processor time and medians, so other work on the host matters little.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
import zmq

from poseidon.exchange.factors.products import Scratch, apply_factors
from ps_server import Rule
from ps_server.rules import update

CHUNK_BYTES = 2 << 20
CHUNKS = 12
"""Chunks that are worked on in turn: more than a cache holds."""
RULE = Rule(momentum=0.9, decay=0.0005)
SIDE, FEW, MANY = 1024, 8, 136
"""Side of the weight, and rows of the factors, whose products are timed."""
MESSAGES = 24
MESSAGE_S = 70e-6
"""A core's time for a message beside its bytes; measured on one machine (benchmarks/results/speed.md), not probed."""
INT8_PASSES = 6.0
"""An encoding in int8 reads and writes about as much memory as so many copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What a host can do.

    Attributes:
        cores: number of its cores.
        gpu: name of its first GPU that torch can use; empty: none.
        flops: floating-point operations a second of one core, of products of factors.
        factors_s_per_byte: a core's time for a byte of a weight updated from factors, without the products.
        wire_s_per_byte: a core's time to send a byte by a socket, or to receive it.
        memory_s_per_byte: a core's time to copy a byte.
        sum_s_per_byte: a core's time to add a byte of gradient to a sum.
        rule_s_per_byte: a core's time to apply SGD with momentum to a byte of the model.
        half_s_per_byte: a core's time to convert a byte of float32 to bfloat16.
    """

    cores: int
    gpu: str
    flops: float
    factors_s_per_byte: float
    wire_s_per_byte: float
    memory_s_per_byte: float
    sum_s_per_byte: float
    rule_s_per_byte: float
    half_s_per_byte: float


def measure_costs(seconds: float) -> HostCosts:
    """Measure all costs.

    Args:
        seconds: how long it may take, about; the shortest runs of each piece of work take a tenth.
    """
    each_s = seconds / 7
    chunks = [[torch.zeros(CHUNK_BYTES // 4) for _ in range(3)] for _ in range(CHUNKS)]
    halves = torch.zeros(CHUNK_BYTES // 4, dtype=torch.bfloat16)

    def of_chunk(work: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> float:
        def all_chunks() -> None:
            for chunk in chunks:
                work(*chunk)

        return _median_s(all_chunks, each_s) / (CHUNKS * CHUNK_BYTES)

    def rule(value: torch.Tensor, gradient: torch.Tensor, history: torch.Tensor) -> None:
        update(RULE, gradient, [history], value, rate=0.01, step=0)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copy_s = of_chunk(lambda a, b, _: np.copyto(a.numpy(), b.numpy()))
        sum_s = of_chunk(lambda a, b, _: a.add_(b))
        rule_s = of_chunk(rule)
        half_s = of_chunk(lambda a, b, _: halves.copy_(a))
        flops, factors_s = _products(2 * each_s)
    finally:
        torch.set_num_threads(threads)
    return HostCosts(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        flops=flops,
        factors_s_per_byte=factors_s,
        wire_s_per_byte=_wire_s_per_byte(each_s),
        memory_s_per_byte=copy_s,
        sum_s_per_byte=sum_s,
        rule_s_per_byte=rule_s,
        half_s_per_byte=half_s,
    )


def worst(costs: list[HostCosts]) -> HostCosts:
    """Return the costs of a host that is as slow as the slowest of these in everything: synchronous jobs wait for it."""
    slowest = {
        name: max(getattr(cost, name) for cost in costs)
        for name in HostCosts.__slots__
        if name.endswith("_per_byte")
    }
    gpus = [cost.gpu for cost in costs]
    return HostCosts(
        cores=min(cost.cores for cost in costs),
        gpu=gpus[0] if all(gpus) else "",
        flops=min(cost.flops for cost in costs),
        **slowest,
    )


def _products(limit_s: float) -> tuple[float, float]:
    """Return the operations a second of products of factors, and the seconds for a byte of the weight besides them."""
    value, history = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
    scratch = Scratch(torch.device("cpu"))

    def update_s(rows: int) -> float:
        u, v = (scratch.stack(name, [np.ones((rows, SIDE), np.float32)], SIDE) for name in ("u", "v"))

        def apply() -> None:
            apply_factors(RULE, u, v, value, [history], rate=0.01, step=0, scale=1e-6, scratch=scratch)

        return _median_s(apply, limit_s / 2)

    few_s, many_s = update_s(FEW), update_s(MANY)
    row_s = max(many_s - few_s, 1e-9) / (MANY - FEW)
    return 2.0 * SIDE * SIDE / row_s, max(few_s - FEW * row_s, 0.0) / (4 * SIDE * SIDE)


def _wire_s_per_byte(limit_s: float) -> float:
    """Return half of what a byte costs that this process sends to itself over loopback."""
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        receiver.bind("tcp://127.0.0.1:0")
        sender.connect(receiver.getsockopt_string(zmq.LAST_ENDPOINT))
        payload = bytearray(CHUNK_BYTES)

        def stream() -> None:
            for _ in range(MESSAGES):
                sender.send(payload, copy=False)
                receiver.recv(copy=False)

        return _median_s(stream, limit_s, time.process_time) / (2 * MESSAGES * CHUNK_BYTES)
    finally:
        sender.close(linger=0)
        receiver.close(linger=0)
        context.term()


def _median_s(
    work: Callable[[], object], limit_s: float, clock: Callable[[], float] = time.thread_time
) -> float:
    """Return the median time of some runs within a limit, at least three, after one that does not count."""
    work()
    seconds: list[float] = []
    end_s = time.monotonic() + limit_s
    while len(seconds) < 3 or (len(seconds) < 9 and time.monotonic() < end_s):
        began_s = clock()
        work()
        seconds.append(clock() - began_s)
    return statistics.median(seconds)


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        try:
            answer: dict[str, object] = asdict(measure_costs(float(json.loads(line)["seconds"])))
        except Exception as error:  # noqa: BLE001 - the program's outermost frame: the other side raises the error
            answer = {"problem": f"its processors cannot be measured: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
