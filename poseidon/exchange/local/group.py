"""Several workers on one host: they sum among themselves first, and one of
them, the leader, exchanges with other hosts.

Laws:

* The leader (local rank 0) holds the inner exchange, whose replicas are hosts. It contributes the
  mean over the workers of its host. Each host has as many workers, so the mean over hosts is the
  mean over all workers. With virtual workers it contributes the sum of each node of its host, and
  of tensors with a codec the gradient of each virtual worker.
* Parts are added in a fixed tree (`HostTree`): repeated runs have the same bits.
* The workers of a host stay in step: whatever the staleness of the inner exchange, a value is
  published to all of them once, and the next one only after each has contributed to the sum before.
* Rank of a worker = rank of its host * local workers + local rank, in collections too.

`leader.py` and `follower.py` are the two sides. A `Reduction` (`reduction.py`) moves tensors: in
memory that the processes share, or by a process group (NCCL on GPUs). Messages over the connections
(`connection.py`) say when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ps_server.monitor import Monitor
from ps_server.network import Network
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGroup:
    """The local group of one worker: the workers of its host.

    Args:
        address: path of a socket in a folder that only this user can enter; the same for all
            workers of the host, and of no other job.
        network: the place of this worker among them; rank 0 leads.
        tree: how parts are added; it has as many workers on every host.
    """

    address: str
    network: Network
    tree: HostTree

    def new_monitor(self) -> Monitor:
        """Return a monitor for the state that the threads of one worker's exchange share."""
        return self.network.new_monitor(
            closed="the exchange is closed", hangs=": a worker of this machine hangs"
        )
