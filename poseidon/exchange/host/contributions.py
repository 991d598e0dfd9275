"""What the workers of a host have contributed to an iteration, tensor by tensor, and how it is
added: the part of the tree of sums that is on the host, and factors in worker order.

It does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.exchange.device import device_of
from poseidon.exchange.factors.factor_rounds import Pair
from ps_server import RemoteProtocolError
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers
from ps_server.transport.base import Buffer


class Contributions:
    """Counts which worker has contributed to and released which tensor.

    Args:
        by_factors: for each tensor whether it travels as factors, which must be released too.
        parts: how many parts of a tensor each worker of the host contributes; factors come as one.
    """

    def __init__(self, by_factors: Sequence[bool], parts: Sequence[int]) -> None:
        self._owed = {
            (index, False): [1] * len(parts) if is_by_factors else list(parts)
            for index, is_by_factors in enumerate(by_factors)
        }
        """By tensor, and whether it is for its release: how often each worker has to note it."""
        for index, is_by_factors in enumerate(by_factors):
            if is_by_factors:
                self._owed[index, True] = [1] * len(parts)
        self._left: dict[tuple[int, bool], list[int]] = {}

    def start(self) -> None:
        """Begin a new iteration."""
        self._left = {key: list(owed) for key, owed in self._owed.items()}

    def owes(self, worker: int) -> bool:
        """Return whether a contribution or release of a worker is missing."""
        return any(left[worker] for left in self._left.values())

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._left

    def note(self, index: int, worker: int, *, release: bool = False) -> bool:
        """Note that a worker has contributed its next part of a tensor, or has released it; return
        whether it is the last of all.
        """
        left = self._left.get((index, release))
        if not (left and left[worker]):
            raise RemoteProtocolError(f"worker {worker} contributes too often")
        left[worker] -= 1
        if any(left):
            return False
        del self._left[index, release]
        return True


class FactorStack:
    """One tensor's factors of all workers of a host, in worker order.

    Args:
        tensor_NM: the tensor, on whose device the factors are wanted.
        divisor: of u: the workers of the host, where their product is to be the mean gradient.
    """

    def __init__(self, tensor_NM: Tensor, *, divisor: int) -> None:
        self._divisor = divisor
        self._device = device_of(tensor_NM.device)
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._u_RN, self._v_RM = (
            tensor_NM.new_empty(0, side, dtype=torch.float32) for side in tensor_NM.shape
        )

    def own(self, worker: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Take the factors of this worker, which are copied at once."""
        self._parts[worker] = (u_KN.detach().clone(), v_KM.detach().clone())

    def add(self, worker: int, rows: int, packed: Buffer) -> None:
        """Take another worker's factors: `rows` rows of u, then of v, float32.

        Raises:
            RemoteProtocolError: they are not so many numbers.
        """
        pair = Pair.received(packed, rows, self._u_RN.shape[1], self._v_RM.shape[1])
        if rows:
            self._parts[worker] = torch.from_numpy(pair.u), torch.from_numpy(pair.v)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return all factors, u (rows x N) and v (rows x M), in memory that is used again in the
        next iteration.
        """
        parts = [self._parts[worker] for worker in sorted(self._parts)]
        self._parts.clear()
        rows = sum(len(u_KN) for u_KN, _ in parts)
        if rows > len(self._u_RN):
            self._device.keep(self._u_RN)
            self._device.keep(self._v_RM)
            self._u_RN = self._u_RN.new_empty(rows, self._u_RN.shape[1])
            self._v_RM = self._v_RM.new_empty(rows, self._v_RM.shape[1])
        place = 0
        for u_KN, v_KM in parts:
            own = slice(place, place + len(u_KN))
            self._u_RN[own].copy_(u_KN).div_(self._divisor)
            self._v_RM[own].copy_(v_KM)
            self._device.keep(u_KN)
            self._device.keep(v_KM)
            place = own.stop
        return self._u_RN[:rows], self._v_RM[:rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTree:
    """The part of a tree of sums that the workers of a host add.

    Args:
        placed: the leaves of the tree, and the workers that have them.
        first: the first of those workers that is on this host.
        workers: of this host.
        averages: whether the sum over the host is divided by its workers.
        leaves: whether the gradient of each leaf comes by itself, as a codec needs it.
    """

    placed: VirtualWorkers
    first: int
    workers: int
    averages: bool
    leaves: bool = False

    @classmethod
    def mean(cls, workers: int) -> HostTree:
        """Return the tree of the mean over the workers of a host."""
        return cls(placed=VirtualWorkers.one_each(workers), first=0, workers=workers, averages=True)

    def parts(self, local_rank: int) -> tuple[Node, ...]:
        """Return the nodes whose sums a worker contributes."""
        return self.placed.nodes(self.first + local_rank, leaves=self.leaves)

    def sums(self, parts: Sequence[Sequence[Tensor]], *, encoded: bool = False) -> list[Tensor]:
        """Return the sums of the largest nodes within the host, or the mean.

        Args:
            parts: the sums of each worker's nodes; they are written to.
            encoded: whether a codec takes each leaf, so that nothing is added.
        """
        if encoded:
            return [part for own in parts for part in own]
        tree = TreeSum[Tensor](self.placed.count)
        for local_rank, own in enumerate(parts):
            for node, part in zip(self.parts(local_rank), own, strict=True):
                tree.put(node, part)
        found = [tree.parts[node] for node in sorted(tree.parts)]
        if self.averages and self.workers > 1:
            found[0].div_(self.workers)
        return found
