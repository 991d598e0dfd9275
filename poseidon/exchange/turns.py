"""What the virtual workers of one process contribute to an iteration, one after another.

Law: a virtual worker begins with the values that all of them begin with, and its gradients are
added to the others' in the tree alone (`ps_server/protocol/virtual_workers.py`). A gradient that it
has not computed is zero, and takes part in the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from poseidon.exchange.base import Trained
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers

Factors = tuple[Tensor, Tensor]


class Turns:
    """Adds what the virtual workers of a process contribute.

    Args:
        leaves: indices of the tensors whose gradients leave by themselves, since each virtual
            worker holds back what a codec has lost of its own.
        in_parts: whether a tensor that has not begun takes no part in an iteration.
    """

    def __init__(
        self,
        tensors: Sequence[Trained],
        placed: VirtualWorkers,
        process: int,
        *,
        leaves: Collection[int] = (),
        in_parts: bool = False,
    ) -> None:
        self._tensors = tensors
        self._own = placed.of(process)
        self._count = placed.count
        self._whole = frozenset(placed.nodes(process))
        self._leaves = frozenset(leaves)
        self._in_parts = in_parts
        self._first: dict[int, Tensor] = {}
        """The values of statistics with which the iteration began."""
        self._factors: dict[int, list[Factors]] = {}
        self.start()

    def start(self) -> None:
        """Begin an iteration."""
        self._turn = self._own.start
        self._begun: set[int] = set()
        self._sums: dict[int, TreeSum[Tensor]] = {}
        self._first.clear()
        self._factors.clear()

    @property
    def is_last(self) -> bool:
        """Whether it is the turn of the last virtual worker."""
        return self._turn == self._own.stop - 1

    def keep(self, index: int) -> None:
        """Keep the value of statistics that has come, for the turns that follow."""
        trained = self._tensors[index]
        if trained.statistics and index not in self._first:
            self._first[index] = trained.tensor.detach().clone()

    def add(self, index: int, gradient: Tensor) -> Tensor | None:
        """Add the gradient of this turn, or the values of statistics.

        Return the sum of a node of this process once it is complete. It may be in the gradient's
        memory.
        """
        self._begun.add(index)
        gradient = gradient.detach()
        leaf = Node(self._turn, self._turn + 1)
        if index in self._leaves:
            return gradient
        tree = self._sums.setdefault(index, TreeSum(self._count))
        return tree.release(leaf, gradient, self._whole)

    def add_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> Factors | None:
        """Stack the factors of this turn below the factors of the turns before. Return them in the
        last turn.
        """
        self._begun.add(index)
        kept = self._factors.setdefault(index, [])
        if not self.is_last:
            kept.append((u_KN.detach().clone(), v_KM.detach().clone()))
            return None
        kept.append((u_KN.detach(), v_KM.detach()))
        return stacked(self._factors.pop(index))

    def rest_of_factors(self) -> list[tuple[int, Factors]]:
        """Return the factors of tensors that the last turn had none of."""
        rest = [(index, stacked(kept)) for index, kept in self._factors.items()]
        self._factors.clear()
        return rest

    def missing(self, by_factors: Collection[int]) -> list[tuple[int, Tensor]]:
        """Return what is still to be added in this turn: the values of statistics, and zeros for
        tensors without a gradient; nothing where such tensors take no part.
        """
        if self._in_parts:
            return []
        return [
            (index, t.tensor.detach().clone() if t.statistics else torch.zeros_like(t.tensor))
            for index, t in enumerate(self._tensors)
            if index not in self._begun and index not in by_factors
        ]

    def next(self) -> None:
        """Begin the next turn, with the statistics of the iteration's begin."""
        self._turn += 1
        self._begun.clear()
        for index, value in self._first.items():
            self._tensors[index].tensor.detach().copy_(value)


def stacked(parts: Sequence[Factors]) -> Factors:
    """Return the factors of several passes below each other."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([u for u, _ in parts]), torch.cat([v for _, v in parts])
