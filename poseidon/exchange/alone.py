"""The carrier of a single process: it applies the update rule, and waits for no other worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.carrier import GradientCarrier, Step
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import AloneDelivery, JobControl
from poseidon.exchange.local_histories import LocalHistories
from ps_server.rules import clip_factor, plain_sum, sum_of_squares, update


class AloneCarrier(GradientCarrier):
    """Applies the gradients of an iteration together in `finish`.

    Args:
        tensors: of the exchange.
        settings: common to all tensors.
        in_parts: whether a tensor that has not begun takes no part in an iteration; otherwise its
            gradient is zero.

    Attributes:
        delivery: of the job control of this worker.
    """

    state: LocalHistories

    def __init__(
        self, tensors: Sequence[Trained], settings: ExchangeSettings, *, in_parts: bool = False
    ) -> None:
        self.indices = range(len(tensors))
        self._tensors = tensors
        self._settings = settings
        self._in_parts = in_parts
        self._flat = [trained.tensor.detach().view(-1) for trained in tensors]
        self._begun: dict[int, Tensor] = {}
        self._step = Step(settings.start_clock, (0.0,))
        self.delivery = AloneDelivery()
        self.delivery.advance(settings.start_clock + 1)
        self.state = LocalHistories(dict(enumerate(tensors)), replicated=False)

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        if clock is not None:
            self.delivery.advance(clock + 1)
        self.state.load(histories)

    def start(self, step: Step) -> None:
        self._step = step
        self.delivery.advance(step.iteration + 1)
        self._begun.clear()

    def begin(self, index: int, gradient: Tensor) -> None:
        self._begun[index] = gradient.detach().reshape(-1)

    def wait(self, index: int) -> None:
        pass

    def finish(self, limit: float) -> None:
        moved = [
            index
            for index, trained in enumerate(self._tensors)
            if not trained.statistics and (index in self._begun or not self._in_parts)
        ]
        gradients = [
            self._begun[i] if i in self._begun else torch.zeros_like(self._flat[i]) for i in moved
        ]
        scale = self._settings.gradient_scale
        if self._settings.clip is not None:
            scale *= clip_factor(plain_sum(map(sum_of_squares, gradients)), self._settings.clip)
        rates, iteration = self._step.rates, self._step.iteration
        for i, gradient in zip(moved, gradients, strict=True):
            if scale != 1.0:
                gradient.mul_(scale)
            trained, history = self._tensors[i], self.state.of[i]
            rate = rates[trained.rate_index]
            update(trained.rule, gradient, history, self._flat[i], rate=rate, step=iteration)
        self._begun.clear()
        self.delivery.advance(iteration + 2)

    def settle(self, clock: int) -> None:
        pass

    def close(self) -> None:
        pass


def exchange_alone(
    tensors: Sequence[Trained], settings: ExchangeSettings, *, in_parts: bool = False
) -> Exchange:
    """Return the exchange of a single process; the arguments are those of its carrier."""
    carrier = AloneCarrier(tensors, settings, in_parts=in_parts)
    return Exchange([carrier], JobControl(carrier.delivery, root=True), settings)
