"""What the virtual workers of a process contribute to an iteration of a solver.

Law: the weights equal the weights of `poseidon train` with as many virtual workers. Their nets
share the parameters. Each net has its own diffs, and its own statistics (BatchNorm), which begin an
iteration with the common values. Diffs and statistics are added in the tree of virtual workers
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from poseidon.pycaffe.graph.build import NetGraph
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers

Total = Callable[[Mapping[Node, Tensor]], Tensor]
"""Returns the sum over all virtual workers of a job, from the sums of this process's nodes."""


class ReplicaContributions:
    """The diffs and statistics of the virtual workers of a process.

    Args:
        nets: the train net of each, which share the blobs of the first.
        placed: the virtual workers of the job.

    Attributes:
        averaged: whether the first net has the means of this iteration.
        infos: of what is averaged, in the order of `tensors`.
    """

    def __init__(self, nets: Sequence[NetGraph], placed: VirtualWorkers, process: int) -> None:
        self.placed = placed
        self.process = process
        self.averaged = False
        learned = [net.learned_blobs() for net in nets]
        for pairs in learned[1:]:
            for info, blob in pairs:
                if info.statistics:
                    blob.bind(blob.read_data().clone())
                    info.parameter.data = blob.write_data().view(info.parameter.shape)
        infos = [info for info, _ in learned[0]]
        self.infos = [
            *(info for info in infos if info.parameter.requires_grad),
            *(info for info in infos if info.statistics),
        ]
        self._diffs = [[b for info, b in of if info.parameter.requires_grad] for of in learned]
        self._statistics = [[b for info, b in of if info.statistics] for of in learned]

    def begin(self) -> None:
        """Begin an iteration, with the common statistics."""
        self.averaged = False
        first, *others = self._statistics
        for blobs in others:
            for blob, common in zip(blobs, first, strict=True):
                blob.write_data().copy_(common.read_data())

    def average(self, total: Total) -> None:
        """Set the diffs and statistics of the first net to the means over all virtual workers."""
        tree: TreeSum[Tensor] = TreeSum(self.placed.count)
        for position, number in enumerate(self.placed.of(self.process)):
            tensors = self.tensors(position)
            flat = torch.cat([tensor.reshape(-1).cpu() for tensor in tensors] or [torch.empty(0)])
            tree.put(Node(number, number + 1), flat)
        mean = total(tree.parts).div_(self.placed.count)
        tensors = self.tensors(0)
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, mean.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))
        self.averaged = True

    def tensors(self, position: int) -> list[Tensor]:
        """Return the diffs, then the statistics, of one of the nets: live tensors."""
        return [
            *(blob.write_diff() for blob in self._diffs[position]),
            *(blob.write_data() for blob in self._statistics[position]),
        ]


def total_alone(sums: Mapping[Node, Tensor]) -> Tensor:
    """Return the sum over all virtual workers of a job with one process."""
    (total,) = sums.values()
    return total
