"""Histories of the update rule on each worker, for tensors whose rule the workers apply themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import History, Trained
from poseidon.exchange.carrier import CarrierState, KeptHistories
from ps_server.rules import history_count


class LocalHistories(CarrierState):
    """The histories of a carrier's tensors.

    Args:
        replicated: whether other replicas keep the same history.

    Attributes:
        of: for each tensor its flat history tensors.
    """

    def __init__(self, tensors: Mapping[int, Trained], *, replicated: bool) -> None:
        self._tensors = tensors
        self._replicated = replicated
        self.of = {
            index: [
                torch.zeros_like(trained.tensor.detach().view(-1))
                for _ in range(history_count(trained.rule.kind))
            ]
            for index, trained in tensors.items()
        }

    def load(self, histories: Sequence[History] | None) -> None:
        """Continue from these histories of all tensors: from zeros where there are none."""
        for index, own in self.of.items():
            history = histories[index] if histories else ()
            for number, tensor in enumerate(own):
                if number < len(history):
                    array = np.ascontiguousarray(history[number], np.float32)
                    tensor.copy_(torch.from_numpy(array).view(-1))
                else:
                    tensor.zero_()

    def histories(self) -> Mapping[int, History]:
        return {index: self._copied(index, None) for index in self.of}

    def keep(self, into: Mapping[int, History]) -> KeptHistories:
        return KeptHistories.here(
            {index: self._copied(index, into.get(index)) for index in self.of}
        )

    def _copied(self, index: int, into: History | None) -> History:
        own, shape = self.of[index], tuple(self._tensors[index].tensor.shape)
        if into is None or len(into) != len(own):
            into = [np.empty(shape, np.float32) for _ in own]
        for array, tensor in zip(into, own, strict=True):
            torch.from_numpy(array).view(-1).copy_(tensor)
        return into

    def replicated(self) -> Mapping[str, Tensor]:
        if not self._replicated:
            return {}
        return {
            f"{self._tensors[index].name}, history {number}": tensor
            for index, own in self.of.items()
            for number, tensor in enumerate(own)
        }
