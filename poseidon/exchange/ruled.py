"""Tensors to which a worker applies the rule itself, and their histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import History, Trained
from poseidon.exchange.carrier import CarrierState, KeptHistories, Step
from ps_server.collection import Coming
from ps_server.rules import history_count, update


class RuledTensor:
    """A tensor to which this worker applies the rule itself.

    Attributes:
        flat: the tensor.
        history: what the rule keeps, flat.
    """

    __slots__ = ("flat", "history", "trained")

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.flat = trained.tensor.detach().view(-1)
        self.history = [
            torch.zeros_like(self.flat) for _ in range(history_count(trained.rule.kind))
        ]

    def apply(self, gradient: Tensor, step: Step, scale: float) -> None:
        """Apply the rule to a gradient times `scale`. The gradient, flat, is written to."""
        if scale != 1.0:
            gradient.mul_(scale)
        rule, rate = self.trained.rule, step.rates[self.trained.rate_index]
        update(rule, gradient, self.history, self.flat, rate=rate, step=step.iteration)

    def load(self, history: History) -> None:
        """Continue from a history: from zeros where there are no arrays."""
        for tensor, array in zip_longest(self.history, history[: len(self.history)]):
            tensor.zero_()
            if array is not None:
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array, np.float32)).view(-1))

    def copied(self, into: History | None) -> History:
        """Return a copy of the history; in these arrays where they fit."""
        if into is None or len(into) != len(self.history):
            shape = tuple(self.trained.tensor.shape)
            into = [np.empty(shape, np.float32) for _ in self.history]
        for array, tensor in zip(into, self.history, strict=True):
            torch.from_numpy(array).view(-1).copy_(tensor)
        return into


class LocalHistories(CarrierState):
    """The histories of a carrier's tensors.

    Args:
        replicated: whether other replicas keep the same history.

    Attributes:
        of: the tensors with their histories.
    """

    def __init__(self, tensors: Mapping[int, Trained], *, replicated: bool) -> None:
        self._replicated = replicated
        self.of = {index: RuledTensor(trained) for index, trained in tensors.items()}

    def load(self, histories: Sequence[History] | None) -> None:
        """Continue from these histories of all tensors: from zeros where there are none."""
        for index, own in self.of.items():
            own.load(histories[index] if histories else ())

    def flat(self) -> list[Tensor]:
        """Return all history tensors."""
        return [tensor for own in self.of.values() for tensor in own.history]

    def keep(self, into: Mapping[int, History]) -> Coming[KeptHistories]:
        kept = {index: own.copied(into.get(index)) for index, own in self.of.items()}
        return Coming.here(KeptHistories(kept))

    def replicated(self) -> Mapping[str, Tensor]:
        if not self._replicated:
            return {}
        return {
            f"{own.trained.name}, history {number}": tensor
            for own in self.of.values()
            for number, tensor in enumerate(own.history)
        }
