"""The work of an exchange on processors, piece by piece, as a job's own code does it: sums,
rules, codecs, products.

Each function runs for about `limit_s` seconds in the calling thread, at least three times. It
returns a core's seconds, of processor time, so that waiting for a core does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.factors.products import Scratch, apply_factors
from poseidon.exchange.lossy.low_rank_matrix import DueUpdate, LowRank, factor_tables, matrices_of
from poseidon.exchange.ruled import RuledTensor
from ps_server import Rule
from ps_server.rules import update

CHUNK_ELEMENTS = 1 << 19
CHUNK_BYTES = 4 * CHUNK_ELEMENTS
CHUNKS = 8
"""Chunks that are worked on in turn: with other processes' chunks more than a cache holds."""
RULE = Rule(momentum=0.9, decay=0.0005)
OUTPUTS, INPUTS = 2048, 4096
"""The shape of the weight whose products are timed."""
FEW, MANY = 8, 136
"""Rows of its factors."""
LOW, HIGH = 1, 4
"""Ranks of PowerSGD."""

OfChunk = Callable[[Tensor, Tensor, Tensor], object]


def copy_s_per_byte(limit_s: float) -> float:
    """Return the time to copy a byte."""
    return _of_chunks(lambda a, b, _: np.copyto(a.numpy(), b.numpy()), limit_s)


def sum_s_per_byte(limit_s: float) -> float:
    """Return the time to add a byte of gradient to a sum."""
    return _of_chunks(lambda a, b, _: a.add_(b), limit_s)


def rule_s_per_byte(limit_s: float) -> float:
    """Return the time to apply SGD with momentum to a byte of the model on a shard."""

    def rule(value: Tensor, gradient: Tensor, history: Tensor) -> None:
        update(RULE, gradient, [history], value, rate=0.01, step=0)

    return _of_chunks(rule, limit_s)


def half_s_per_byte(limit_s: float) -> float:
    """Return the time to convert a byte of float32 to bfloat16."""
    halves = torch.zeros(CHUNK_ELEMENTS, dtype=torch.bfloat16)
    return _of_chunks(lambda a, b, _: halves.copy_(a), limit_s)


def optimizer_s_per_byte(limit_s: float) -> float:
    """Return the time of SGD with momentum for a byte of a model, in the steps of torch's
    optimizer on a processor.
    """

    def step(value: Tensor, gradient: Tensor, history: Tensor) -> None:
        decayed = gradient.add(value, alpha=RULE.decay)
        history.mul_(RULE.momentum).add_(decayed)
        value.add_(history, alpha=-0.01)

    return _of_chunks(step, limit_s)


def of_ranks(low_s: float, high_s: float) -> tuple[float, float]:
    """Return the seconds for a byte of the matrix besides the rank, and for each rank."""
    size = 4 * OUTPUTS * INPUTS
    rank_s = max(high_s - low_s, 0.0) / (HIGH - LOW)
    return max(low_s - LOW * rank_s, 0.0) / size, rank_s / size


def products(few_s: float, many_s: float) -> tuple[float, float]:
    """Return the operations a second of products of factors, and the seconds for a byte of the
    weight besides them.
    """
    row_s = max(many_s - few_s, 1e-9) / (MANY - FEW)
    return 2.0 * OUTPUTS * INPUTS / row_s, max(few_s - FEW * row_s, 0.0) / (4 * OUTPUTS * INPUTS)


def _low_rank_s(rank: int, limit_s: float) -> float:
    trained = Trained(name="matrix", tensor=torch.zeros(OUTPUTS, INPUTS), rule=RULE)
    (shared,) = factor_tables([trained], {0: LowRank(rank)})
    ruled = {0: RuledTensor(trained)}
    matrix = matrices_of(shared, ruled, range(1), shared.held[0].tensor.cpu())[0]
    gradient = torch.ones(OUTPUTS, INPUTS)
    p, q = (held.tensor.view(rank, -1) for held in shared.held)

    def iteration() -> None:
        matrix.take(0, gradient, 1e-6, p)
        matrix.take_basis()
        matrix.second(0, 1.0, q)
        matrix.due = DueUpdate(Step(0, (0.01,)), is_exact=False)
        matrix.apply()

    return median_s(iteration, limit_s)


def _factors_s(rows: int, limit_s: float) -> float:
    value, history = torch.zeros(OUTPUTS, INPUTS), torch.zeros(OUTPUTS, INPUTS)
    scratch = Scratch(torch.device("cpu"))
    u, v = (
        scratch.stack(name, [np.ones((rows, columns), np.float32)], columns)
        for name, columns in (("u", OUTPUTS), ("v", INPUTS))
    )

    def apply() -> None:
        apply_factors(RULE, u, v, value, [history], rate=0.01, step=0, scale=1e-6, scratch=scratch)

    return median_s(apply, limit_s)


few_rows_s, many_rows_s = partial(_factors_s, FEW), partial(_factors_s, MANY)
"""The time to update a weight from few rows of factors, and from many."""
low_rank_s, high_rank_s = partial(_low_rank_s, LOW), partial(_low_rank_s, HIGH)
"""The time of a worker for a matrix that travels by PowerSGD of the lower rank, and of the higher:
factors, product, rule.
"""


def _of_chunks(work: OfChunk, limit_s: float) -> float:
    chunks = [[torch.zeros(CHUNK_ELEMENTS) for _ in range(3)] for _ in range(CHUNKS)]

    def all_chunks() -> None:
        for chunk in chunks:
            work(*chunk)

    return median_s(all_chunks, limit_s) / (CHUNKS * CHUNK_BYTES)


def median_s(work: Callable[[], object], limit_s: float) -> float:
    """Return the median time of some runs within a limit, at least three, after one that does
    not count.
    """
    work()
    seconds: list[float] = []
    end_s = time.monotonic() + limit_s
    while len(seconds) < 3 or time.monotonic() < end_s:
        began_s = time.thread_time()
        work()
        seconds.append(time.thread_time() - began_s)
    return statistics.median(seconds)
