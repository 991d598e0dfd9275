"""A worker's copy of the net that is measured, emulated or computed, with its batches.

Law: every system that is measured trains the same module, from the same weights, on the same
batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor, nn

from benchmarks.testbed.computed import COMPUTED, SEED
from benchmarks.testbed.emulated import EmulatedNet
from benchmarks.testbed.worker_settings import TrainingSettings


class Replica:
    """A net and its batches.

    Args:
        training: the training.
        rank: of the worker.
    """

    def __init__(self, training: TrainingSettings, rank: int) -> None:
        self.net: nn.Module
        self.example: tuple[Tensor, ...] = ()
        self._training = training
        self._rank = rank
        self._batches: Iterator[tuple[Tensor, ...]] = repeat(())
        if training.computed:
            net = COMPUTED[training.computed]
            torch.manual_seed(SEED)
            self.net = net.build()
            self.example = next(net.batches(rank=rank, rows=training.batch))
            self._batches = net.batches(rank=rank, rows=training.batch)
        else:
            self.net = EmulatedNet(
                training.layers, batch=training.batch, compute_s=training.compute_s
            )

    @property
    def adamw(self) -> bool:
        """Whether AdamW trains it; otherwise SGD with momentum."""
        return bool(self._training.computed) and COMPUTED[self._training.computed].adamw

    def optimizer(self) -> torch.optim.Optimizer:
        """Return torch's optimizer of the net."""
        training = self._training
        if self.adamw:
            return torch.optim.AdamW(self.net.parameters(), lr=training.rate)
        return torch.optim.SGD(
            self.net.parameters(),
            lr=training.rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )

    def begin(self) -> None:
        """Begin training: random numbers of layers, such as dropout's, are the rank's own."""
        torch.manual_seed(SEED + self._rank)

    def loss(self, net: nn.Module) -> Tensor:
        """Return the loss of the next batch.

        Args:
            net: the net, or what wraps it.
        """
        loss: Tensor = net(*next(self._batches)).sum()
        return loss
