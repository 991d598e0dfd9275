"""The part of the tree of sums that the workers of a host add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers


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
