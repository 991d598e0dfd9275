"""float32 values of module tensors of 16 bits.

The shards hold the masters of parameters alone where they apply the rule. In other jobs each worker
has them beside the module.

Law: sums, rules and their histories never see a rounded value. A tensor of the module is its
master, rounded, whenever a forward pass may use it. Statistics are taken from the module before the
exchange averages them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import Trained, local_of
from poseidon.exchange.membership import Membership
from poseidon.exchange.server.table import of_values
from ps_server import Consistency, RuleKind

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types of tensors that can be exchanged."""


def as_float32(tensor: Tensor) -> Tensor:
    """Return what the exchange holds of a tensor of the module: its memory, or a float32 copy."""
    data = tensor.detach()
    return data if data.dtype is torch.float32 else data.float().contiguous()


def under_a_rule(tensor: Tensor, member: Membership) -> Tensor:
    """Return what the exchange holds of a parameter that follows a rule: its memory, where the
    shards have its master, or a float32 copy.
    """
    options = member.options
    on_shards = (
        options.kind.has_shards
        and not member.alone
        and not member.shares_hosts
        and member.placed.is_one_each
        and options.consistency is Consistency.SSP_PUSH
        and not (options.staleness or options.local_steps or options.is_encoded)
    )
    return tensor.detach() if on_shards else as_float32(tensor)


class Masters:
    """The masters of one module. Those on the shards are known by `ServerTable.of_values` to
    `CarrierState.held_back`.

    Args:
        tensors: of the exchange. Mean gradients for an optimizer are not masters.
        sources: the tensor of the module behind each of them.
    """

    def __init__(self, tensors: Sequence[Trained], sources: Sequence[Tensor]) -> None:
        self._pairs = {
            index: (trained, source)
            for index, (trained, source) in enumerate(zip(tensors, sources, strict=True))
            if trained.tensor.dtype is not source.dtype
            and (trained.statistics or trained.rule.kind is not RuleKind.MEAN)
        }
        """The masters of this worker."""
        self._on_shards = [t for t in tensors if t.tensor.dtype is not torch.float32]

    def publish(self, index: int) -> None:
        """Round a master to its tensor of the module, if there is one of this index."""
        if index in self._pairs:
            trained, source = self._pairs[index]
            # no change by the script: no new version
            local_of(source).data.copy_(trained.tensor.detach())

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

    def from_shards(self, held_back: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the masters on the shards out of what the exchange holds back, by name."""
        return {
            trained.name: held_back.pop(of_values(trained.name)).view(trained.tensor.shape)
            for trained in self._on_shards
            if of_values(trained.name) in held_back
        }

    def for_shards(self, state: Mapping[str, Tensor]) -> dict[str, NDArray[np.float32]]:
        """Return masters by the names of the exchange; those that are missing are the tensors of
        the module.

        Raises:
            SnapshotError: one has a different shape.
        """
        found = [(t, state[t.name]) for t in self._on_shards if t.name in state]
        for trained, value in found:
            _check_shape(trained, value)
        return {of_values(t.name): value.reshape(-1).numpy() for t, value in found}

    def state(self) -> dict[str, Tensor]:
        """Return the masters of this worker by name, on the CPU."""
        return {
            trained.name: trained.tensor.detach().cpu().clone()
            for trained, _ in self._pairs.values()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load masters; those that are missing are the tensors of the module.

        Raises:
            SnapshotError: one has a different shape.
        """
        for trained, source in self._pairs.values():
            value = state.get(trained.name, local_of(source.detach()))
            _check_shape(trained, value)
            trained.tensor.detach().copy_(value)


def _check_shape(trained: Trained, value: Tensor) -> None:
    if value.shape != trained.tensor.shape:
        raise SnapshotError(f"the checkpoint has no master that fits '{trained.name}'")
