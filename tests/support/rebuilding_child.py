"""A thread that rebuilds gradients from factors, as a worker has one; prints the growth of
memory in bytes.
"""

from __future__ import annotations

import json
import sys
import threading

import numpy as np
import psutil
import torch

from poseidon.exchange.factors.products import Scratch, apply_factors
from ps_server import Rule, RuleKind

WARM_UP, SHAPES = 200, ((64, 512), (10, 64))
RULE = Rule(kind=RuleKind.SGD, momentum=0.9, decay=0.0005)


class Rebuilding:
    """Two weights, their histories, and a round of two workers' factors for each."""

    def __init__(self) -> None:
        self.weights = [(torch.zeros(shape), torch.zeros(shape)) for shape in SHAPES]
        self.factors = [
            tuple([np.zeros((8, side), np.float32)] * 2 for side in shape) for shape in SHAPES
        ]
        self.scratch = Scratch(torch.device("cpu"))

    def iterate(self, step: int) -> None:
        """Apply a round of each weight."""
        for (value, history), (u, v) in zip(self.weights, self.factors, strict=True):
            stacked = (
                self.scratch.stack("u", u, len(value)),
                self.scratch.stack("v", v, value.shape[1]),
            )
            apply_factors(
                RULE,
                *stacked,
                value,
                [history],
                rate=0.01,
                step=step,
                scale=0.5,
                scratch=self.scratch,
            )


def main(iterations: int) -> None:
    """Measure this process's memory before and after."""
    held: list[int] = []
    process, rebuilding = psutil.Process(), Rebuilding()

    def work() -> None:
        with torch.no_grad():
            for step in range(WARM_UP + iterations):
                if step == WARM_UP:
                    held.append(process.memory_info().rss)
                rebuilding.iterate(step)
        held.append(process.memory_info().rss)

    torch.set_num_threads(1)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(json.dumps(held[1] - held[0]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
