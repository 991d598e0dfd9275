"""Reduction by collective operations: NCCL between the GPUs of a host, gloo where there is none.

Law: all processes of a group call its operations in the same order. Parts are reduced in an order
that is fixed at the start, whatever order the gradients come in; values are broadcast in the
tensors' order. The two have a group each, as one does not wait for the other. On GPUs both run
beside the compute stream, on NCCL's own streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poseidon.exchange.local.process_group import Backend, ProcessGroup, Rendezvous, Waiter
from ps_server.network import Network


class GroupTensors:
    """A `Reduction` by a process group.

    Args:
        tensors: flat views of this worker's tensors.
        order: in which parts are reduced; tensors that have no parts are not in it.
        network: this worker's rank and the group's size; rank 0 is the leader.
        rendezvous: the store through which the group is formed.
        watch: see `ProcessGroup`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        order: Sequence[int],
        network: Network,
        rendezvous: Rendezvous,
        backend: Backend,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._tensors = tensors
        self._order = order
        self._size = network.size
        self._parts_group = ProcessGroup(rendezvous, "parts", network, backend, watch)
        self._values_group = ProcessGroup(rendezvous, "values", network, backend, watch)
        self._contributed: dict[int, Tensor] = {}
        self._next_part = 0
        self._flights: dict[int, Waiter] = {}
        self._whole: set[int] = set()
        self._next_mean = 0
        self._next_value = 0
        self._ahead: set[int] = set()
        self._publishing: dict[int, Waiter] = {}

    def contribute(self, index: int, part: Tensor | None, number: int = 0) -> None:
        """Reduce parts in the fixed order; they are overwritten."""
        self._contributed[index] = torch.zeros_like(self._tensors[index]) if part is None else part
        while (following := self._order[self._next_part]) in self._contributed:
            self._flights[following] = self._parts_group.reduce(self._contributed.pop(following))
            self._next_part = (self._next_part + 1) % len(self._order)

    def due(self, index: int) -> Sequence[int]:
        self._whole.add(index)
        found = []
        while (following := self._order[self._next_mean]) in self._whole:
            self._whole.discard(following)
            found.append(following)
            self._next_mean = (self._next_mean + 1) % len(self._order)
        return found

    def sums(self, index: int, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the mean of all parts, in the memory of the leader's."""
        self._flights.pop(index)()
        return [own[0].div_(self._size)]

    def publish(self, index: int) -> None:
        self._publishing[index] = self._values_group.broadcast(self._tensors[index])

    def published(self, index: int) -> None:
        self._publishing.pop(index)()

    def receive(self, index: int) -> None:
        """Receive this value, and all earlier ones, as they come first."""
        while index not in self._ahead:
            following = self._next_value
            self._values_group.broadcast(self._tensors[following])()
            self._ahead.add(following)
            self._next_value = (following + 1) % len(self._tensors)
        self._ahead.discard(index)

    def close(self) -> None:
        del self._parts_group, self._values_group
