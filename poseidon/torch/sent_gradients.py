"""Keeps a few gradients of a step, to notice a script that changes gradients after they were sent.

GradScaler unscales outside of autograd, so the version counter of a tensor does not show the change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.device import Event, device_of
from poseidon.exchange.local_parts import local_of

SAMPLED = 2
SAMPLED_VALUES = 64
MOST_FLAGS = 4 * SAMPLED
"""Comparisons of four steps at most are on their way."""


class SentGradients:
    """Gradients of this step, with their first values as sent.

    Args:
        refusal: the sentence about gradients that have changed.
    """

    def __init__(self, context: WorkerContext, refusal: str) -> None:
        member = context.member
        # of an owner they are overwritten with the sum of its host's workers, and of several
        # virtual workers with their sum
        owns = member.local_workers > 1 and member.local_rank < member.planes
        self._is_blind = owns or member.takes_turns
        self._refusal = refusal
        self._sent: list[tuple[Tensor, Tensor]] = []
        self._flags: deque[tuple[Tensor, Event]] = deque()
        """Results of comparisons on a device, which come after their events."""

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note the gradients of these parameters at the end of a backward pass."""
        if self._is_blind:
            return
        gradients = (parameter.grad for parameter in parameters)
        kept = islice((local_of(g).detach() for g in gradients if g is not None), SAMPLED)
        self._sent = [(gradient, _first(gradient).clone()) for gradient in kept]

    def check(self) -> None:
        """Refuse changed gradients, and forget them all. On a device they are refused a step or
        more later: the script does not wait for the comparison.

        Raises:
            UsageError: one has changed.
        """
        for gradient, sent in self._sent:
            device = device_of(gradient.device)
            differ = (_first(gradient) != sent).any()
            if device.is_host:
                self._refuse(differ)
                continue
            flag = device.host_memory(1, dtype=torch.bool)
            flag.copy_(differ, non_blocking=True)
            self._flags.append((flag, device.event()))
        self._sent.clear()
        while self._flags and (len(self._flags) > MOST_FLAGS or self._flags[0][1].query()):
            flag, copied = self._flags.popleft()
            copied.synchronize()
            self._refuse(flag)

    def _refuse(self, differ: Tensor) -> None:
        if bool(differ):
            raise UsageError(self._refusal)

    def forget(self) -> None:
        self._sent.clear()


def _first(gradient: Tensor) -> Tensor:
    """Return the bits of its first values: NaN equals itself."""
    return gradient.reshape(-1)[:SAMPLED_VALUES].contiguous().view(torch.uint8)
