"""Which records of a dataset a worker reads: a torch Sampler.

Law: worker g of W reads places g, g + W, g + 2 W, ... of one order that all workers share, so that the g-th parts of all
workers' batches are together the batch that one process would read. All read equally many: the order wraps around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from poseidon.errors import UsageError


class SharedSampler(Sampler[int]):
    """Each iteration over it is one epoch; the next one has another order.

    Args:
        dataset: anything with a length.
        rank: this worker.
        workers: number of workers.
        shuffle: whether the order is drawn anew for each epoch.
        seed: of the orders; the same on every worker.

    Attributes:
        epoch: the next epoch, from 0; set it to go on from a saved run.
    """

    def __init__(
        self, dataset: Sized, *, rank: int, workers: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._records = len(dataset)
        if self._records == 0:
            raise UsageError("the dataset is empty")
        self._rank = rank
        self._workers = workers
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """The places of this worker in the next epoch."""
        order = self._order(self.epoch)
        self.epoch += 1
        return (order[place % self._records] for place in self._places())

    def __len__(self) -> int:
        """Records of this worker in an epoch."""
        return len(self._places())

    def _places(self) -> range:
        rounds = -(-self._records // self._workers)
        return range(self._rank, rounds * self._workers, self._workers)

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._records))
        generator = torch.Generator("cpu").manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._records, generator=generator, device="cpu").tolist()
        return order
