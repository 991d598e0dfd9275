"""The speed of this worker's processor for a net, so that virtual workers are divided by it.

Law: a measurement leaves nothing behind. It has a net of its own, with parameters, readers and
generators that are thrown away.
"""

from __future__ import annotations

import statistics
import time

import torch

from poseidon.layers.base import LayerContext
from poseidon.net.compile import compile_net
from poseidon.net.net import Net
from poseidon.proto.definition import SolverDefinition

LIMIT_S = 2.0
"""A measurement ends after so long, and at least three passes."""
LEAST_PASSES = 3


def passes_per_second(solver: SolverDefinition, context: LayerContext) -> float:
    """Return how many forward and backward passes of a solver's train net this worker makes in a
    second, alone.

    Args:
        solver: the definition.
        context: of a virtual worker of this process.
    """
    definition = solver.net_definition()
    net = compile_net(definition, context, state=solver.train_state(definition))
    try:
        return 1 / _seconds(net, context.device)
    finally:
        net.close()


def _seconds(net: Net, device: torch.device) -> float:
    """Return the median time of a pass, after a first one that does not count."""
    _pass(net, device)
    found: list[float] = []
    until_s = time.monotonic() + LIMIT_S
    while len(found) < LEAST_PASSES or time.monotonic() < until_s:
        began_s = time.perf_counter()
        _pass(net, device)
        found.append(time.perf_counter() - began_s)
    return max(statistics.median(found), 1e-9)


def _pass(net: Net, device: torch.device) -> None:
    net()
    if net.loss.requires_grad:
        net.loss.backward()
    net.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
