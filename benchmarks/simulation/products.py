"""A weight that is updated from factors repeatedly, by the code that a job runs."""

from __future__ import annotations

import torch

from poseidon.exchange.factors.products import Scratch, apply_factors
from ps_server import Rule

RULE = Rule(momentum=0.9, decay=0.0005)
OUTPUTS, INPUTS = 4096, 4096
"""The shape of fc7 of AlexNet and VGG."""
WORKERS = 4


class Products:
    """The weight, its history and the factors of some workers.

    Args:
        rows: rows of the factors of all workers together.
    """

    def __init__(self, rows: int) -> None:
        self._value, self._history = torch.zeros(OUTPUTS, INPUTS), torch.zeros(OUTPUTS, INPUTS)
        self._u, self._v = (
            [torch.randn(rows // WORKERS, columns).numpy() for _ in range(WORKERS)]
            for columns in (OUTPUTS, INPUTS)
        )
        self._scratch = Scratch(torch.device("cpu"))

    def apply(self) -> None:
        """Apply one update."""
        apply_factors(
            RULE,
            self._scratch.stack("u", self._u, OUTPUTS),
            self._scratch.stack("v", self._v, INPUTS),
            self._value,
            [self._history],
            rate=0.01,
            step=0,
            scale=0.5,
            scratch=self._scratch,
        )
