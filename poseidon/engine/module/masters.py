"""float32 values of module tensors of 16 bits.

Law: the exchange holds float32: sums, rules and their histories never see a rounded value. A
tensor of the module is its master, rounded, whenever a forward pass may use it. Statistics are
taken from the module before the exchange averages them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import Trained
from ps_server import RuleKind

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types of tensors that can be exchanged."""


def as_float32(tensor: Tensor) -> Tensor:
    """Return what the exchange holds of a tensor of the module: its memory, or a float32 copy."""
    data = tensor.detach()
    return data if data.dtype is torch.float32 else data.float().contiguous()


class Masters:
    """The masters of one module.

    Args:
        tensors: of the exchange. Mean gradients for an optimizer are no masters.
        sources: the tensor of the module behind each of them.
    """

    def __init__(self, tensors: Sequence[Trained], sources: Sequence[Tensor]) -> None:
        self._pairs = {
            index: (trained, source)
            for index, (trained, source) in enumerate(zip(tensors, sources, strict=True))
            if source.dtype is not torch.float32
            and (trained.statistics or trained.rule.kind is not RuleKind.MEAN)
        }

    def publish(self, index: int) -> None:
        """Round a master to its tensor of the module, if there is one of this index."""
        if index in self._pairs:
            trained, source = self._pairs[index]
            source.data.copy_(trained.tensor.detach())  # no change by the script: no new version

    def publish_all(self) -> None:
        """Round all masters to their tensors."""
        for index in self._pairs:
            self.publish(index)

    def take_statistics(self) -> None:
        """Take what the forward pass of the module has changed."""
        for trained, source in self._pairs.values():
            if trained.statistics:
                trained.tensor.detach().copy_(source)

    def publish_statistics(self) -> None:
        """Round the masters of statistics to their tensors."""
        for index, (trained, _) in self._pairs.items():
            if trained.statistics:
                self.publish(index)

    def state(self) -> dict[str, Tensor]:
        """Return the masters by name, on the CPU."""
        return {
            trained.name: trained.tensor.detach().cpu().clone()
            for trained, _ in self._pairs.values()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load masters; those that are missing are the tensors of the module.

        Raises:
            SnapshotError: one has another shape.
        """
        for trained, source in self._pairs.values():
            value = state.get(trained.name, source.detach())
            if value.shape != source.shape:
                raise SnapshotError(f"the checkpoint has no master that fits '{trained.name}'")
            trained.tensor.detach().copy_(value)
