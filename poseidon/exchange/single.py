"""One process: the update rule is applied here, and there is nobody to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from poseidon.exchange.base import Ask, ExchangeSettings, History, Trained, WholeGradients
from ps_server import Signal, SignalKind
from ps_server.rules import clip_factor, history_count, sum_of_squares, update


class LocalExchange(WholeGradients):
    """See `Exchange`. Gradients are applied as they come, or together in `finish` when their norm is limited."""

    def __init__(self, tensors: Sequence[Trained], settings: ExchangeSettings) -> None:
        self._tensors = tensors
        self._settings = settings
        self._flat = [trained.tensor.detach().view(-1) for trained in tensors]
        self._histories = [
            [torch.zeros_like(flat) for _ in range(history_count(trained.rule.kind))]
            for trained, flat in zip(tensors, self._flat, strict=True)
        ]
        self._begun: dict[int, Tensor] = {}
        self._iteration = settings.start_clock
        self._rate = 0.0
        self._signals: list[Signal] = []

    def open(self, histories: Sequence[History] | None) -> None:
        """See `Exchange`."""
        for own, given in zip(self._histories, histories or (), strict=False):
            for tensor, array in zip(own, given, strict=True):
                tensor.copy_(torch.from_numpy(array).reshape(-1))

    def reopen(self, histories: Sequence[History] | None, clock: int) -> None:
        """See `Exchange`."""
        self._iteration = clock
        self.open(histories)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._rate = rate
        self._begun.clear()

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
            scale *= clip_factor(sum(map(sum_of_squares, gradients)), self._settings.clip)
        for i, gradient in zip(moved, gradients, strict=True):
            trained, flat, history = self._tensors[i], self._flat[i], self._histories[i]
            if scale != 1.0:
                gradient.mul_(scale)
            update(trained.rule, gradient, history, flat, rate=self._rate, step=self._iteration)
        self._begun.clear()

    def settle(self) -> None:
        """See `Exchange`."""

    def histories(self) -> list[History]:
        """See `Exchange`."""
        return [
            [tensor.detach().cpu().numpy().reshape(trained.tensor.shape) for tensor in history]
            for trained, history in zip(self._tensors, self._histories, strict=True)
        ]

    def replicated_state(self) -> Mapping[str, Tensor]:
        """See `Exchange`."""
        return {}

    def gather(self, payload: bytes) -> Ask:
        """See `Exchange`."""
        return lambda: (payload,)

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        """See `Exchange`."""
        found = ask()
        assert found is not None
        return found

    def signal(self, kind: SignalKind) -> None:
        """See `Exchange`."""
        self._signals.append(Signal(kind, self._iteration + 1))

    @property
    def signals(self) -> tuple[Signal, ...]:
        """See `Exchange`."""
        return tuple(self._signals)

    def close(self) -> None:
        """See `Exchange`."""
