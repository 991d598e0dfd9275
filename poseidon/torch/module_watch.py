"""What a group watches of its module: where a backward pass reaches it; and a few gradients of a step,
to notice a script that changes gradients after they were sent.

Law: a backward pass is noticed on `backward()`, which brings gradients to the module's parameters,
and not on `torch.autograd.grad`, which does not. The backward pass of a torch checkpoint
(`use_reentrant=True`) lies within the one that was noticed before.

GradScaler unscales outside of autograd, so the version counter of a gradient does not show the
change; `SentGradients` compares values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from poseidon.errors import UsageError
from poseidon.exchange.base import local_of
from poseidon.exchange.device import Event, device_of
from poseidon.exchange.membership import Membership
from poseidon.exchange.module_hooks import OfOneModule


class OutputWatch:
    """A hook on the outputs of one module: the first point that a backward pass reaches.

    Args:
        on_backward: called within each backward pass, once for each output.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[Tensor], on_backward: Callable[[], None]
    ) -> None:
        self._on_backward = on_backward
        self._leaves = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handle = module.register_forward_hook(OfOneModule(self._watch))

    def close(self) -> None:
        self._handle.remove()
        self._leaves.clear()

    def _watch(self, module: nn.Module, arguments: object, outputs: object) -> None:
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._reached)

    def _reached(self, _: Tensor) -> None:
        if self._continues_to_parameters():
            self._on_backward()

    def _continues_to_parameters(self) -> bool:
        try:
            return any(torch._C._will_engine_execute_node(leaf) for leaf in self._leaves)
        except RuntimeError:
            # torch has no answer for parameters that torch.autograd.grad is called with
            return False


SAMPLED = 2
SAMPLED_VALUES = 64
MOST_FLAGS = 4 * SAMPLED
"""Comparisons of four steps at most are on their way."""


class SentGradients:
    """Gradients of this step, with their first values as sent."""

    def __init__(self, member: Membership, refusal: str) -> None:
        # of an owner they are overwritten with the sum of its host's workers, and of several
        # virtual workers with their sum
        owns = member.seat.local_workers > 1 and member.seat.local_rank < member.seats.planes
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
