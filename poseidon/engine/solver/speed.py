"""The speed of this worker's processor for a net, so that virtual workers are divided by it.

Law: a measurement leaves nothing behind. It has a net of its own, with parameters, readers and
generators that are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from poseidon.layers.base import LayerContext
from poseidon.net.compile import compile_net
from poseidon.net.net import Net
from poseidon.proto.definition import SolverDefinition

LIMIT_S = 2.0
"""A measurement ends after so long, and at least three passes."""
LEAST_PASSES = 3


def passes_per_second(
    solver: SolverDefinition, context: LayerContext, meet: Callable[[], object]
) -> float:
    """Return how many forward and backward passes of a solver's train net this worker makes in a
    second, while the other workers make theirs.

    Args:
        solver: the definition.
        context: of a virtual worker of this process.
        meet: returns once all workers are about to measure, so that none of them is still starting.
    """
    definition = solver.net_definition()
    net = compile_net(definition, context, state=solver.train_state(definition))
    try:
        _pass(net, context.device)  # the first takes longer
        meet()
        return _passes_per_second(net, context.device)
    finally:
        net.close()


def _passes_per_second(net: Net, device: torch.device) -> float:
    """Return the number of passes in a while, divided by its time: with the moments in which the
    system gives a limited process no processor.
    """
    count, began_s = 0, time.monotonic()
    while count < LEAST_PASSES or time.monotonic() < began_s + LIMIT_S:
        _pass(net, device)
        count += 1
    return count / max(time.monotonic() - began_s, 1e-9)


def _pass(net: Net, device: torch.device) -> None:
    net()
    if net.loss.requires_grad:
        net.loss.backward()
    net.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
