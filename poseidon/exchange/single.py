"""The exchange of a single process: it applies the update rule, and waits for no other worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, LocalHistories, Trained, WholeGradients
from poseidon.exchange.control import AloneDelivery, JobControl
from ps_server.rules import clip_factor, plain_sum, sum_of_squares, update


class SingleProcessExchange(WholeGradients):
    """See `Exchange`. The gradients of an iteration are applied together in `finish`."""

    def __init__(self, tensors: Sequence[Trained], settings: ExchangeSettings) -> None:
        self._tensors = tensors
        self._settings = settings
        self._flat = [trained.tensor.detach().view(-1) for trained in tensors]
        self._begun: dict[int, Tensor] = {}
        self._iteration = settings.start_clock
        self._rate = 0.0
        self._delivery = AloneDelivery()
        self._delivery.advance(self._iteration + 1)
        self.state = LocalHistories(tensors, replicated=False)
        self.control = JobControl(self._delivery, root=True)

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        if clock is not None:
            self._set_iteration(clock)
        self.state.load(histories)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._set_iteration(iteration)
        self._rate = rate
        self._begun.clear()

    def _set_iteration(self, iteration: int) -> None:
        self._iteration = iteration
        self._delivery.advance(iteration + 1)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        self._begun[index] = gradient.detach().reshape(-1)

    def wait(self, index: int) -> None:
        """See `Exchange`."""

    def finish(self) -> None:
        """See `Exchange`."""
        moved = [i for i, trained in enumerate(self._tensors) if not trained.statistics]
        gradients = [self._begun[i] if i in self._begun else torch.zeros_like(self._flat[i]) for i in moved]
        scale = self._settings.gradient_scale
        if self._settings.clip is not None:
            scale *= clip_factor(plain_sum(map(sum_of_squares, gradients)), self._settings.clip)
        for i, gradient in zip(moved, gradients, strict=True):
            rule, history = self._tensors[i].rule, self.state.of[i]
            if scale != 1.0:
                gradient.mul_(scale)
            update(rule, gradient, history, self._flat[i], rate=self._rate, step=self._iteration)
        self._begun.clear()
        self._delivery.advance(self._iteration + 2)

    def settle(self) -> None:
        """See `Exchange`."""

    def close(self) -> None:
        """See `Exchange`."""
