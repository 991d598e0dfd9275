"""Collections among the workers of a group, and the position of this worker's loop.

Law: all workers call a collection of the same name after equally many steps. A collection that finds other numbers of
steps is an error on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poseidon.engine.module.worker_context import LoopPosition
from poseidon.errors import UsageError
from poseidon.exchange.control import JobControl


class GroupCollections:
    """Collections of one worker with all others.

    Args:
        control: job control of the exchange.
        on_progress: called after each step and at the begin and end of each collection.

    Attributes:
        steps: steps finished.
    """

    def __init__(self, control: JobControl, on_progress: Callable[[LoopPosition], None]) -> None:
        self._control = control
        self.on_progress = on_progress
        self.steps = 0
        self._begun = 0

    def finish_step(self) -> None:
        """Count one more step."""
        self.steps += 1
        self.on_progress(LoopPosition(steps=self.steps, collections=self._begun))

    def all_gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Return the payloads of all workers by rank, wherever their loops are."""
        return self._control.all_gather(payload)

    def all_gather_in_step(self, name: str, payload: bytes) -> list[bytes]:
        """Return the payloads of all workers by rank, whose loops have made equally many steps.

        Args:
            name: the method that the script has called.
            payload: this worker's.

        Raises:
            UsageError: the workers have not made as many steps, or call other methods.
        """
        with self.waiting(name):
            parts = self.all_gather(f"{name} {self.steps}\n".encode() + payload)
        heads, bodies = zip(*(part.split(b"\n", 1) for part in parts), strict=True)
        names, steps = zip(*(head.decode().split(" ") for head in heads), strict=True)
        for rank, other in enumerate(names):
            if other != names[0]:
                raise UsageError(
                    f"worker 0 calls {names[0]}() where worker {rank} calls {other}(); expected the same calls in the same "
                    "order on all workers"
                )
        if len(set(steps)) > 1:
            raise UsageError(
                f"{name}() was called after {', '.join(steps)} steps on the workers; expected as many on each"
            )
        return list(bodies)

    def mean(self, numbers: Tensor) -> NDArray[np.float64]:
        """Return the mean over all workers of a tensor's numbers, in its shape.

        Raises:
            UsageError: the workers have not made as many steps, or not given as many numbers.
        """
        parts = self.all_gather_in_step("mean", numbers.double().cpu().numpy().tobytes())
        if len({len(part) for part in parts}) > 1:
            counts = ", ".join(str(len(part) // 8) for part in parts)
            raise UsageError(f"mean() was given {counts} numbers on the workers; expected as many on each")
        mean: NDArray[np.float64] = np.mean([np.frombuffer(part, np.float64) for part in parts], axis=0)
        return mean.reshape(numbers.shape)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Report that this worker waits for all others inside the block; without a name it does not wait."""
        self._begun += bool(name)
        position = LoopPosition(steps=self.steps, collections=self._begun)
        self.on_progress(replace(position, collection=name))
        try:
            yield
        finally:
            self.on_progress(position)
