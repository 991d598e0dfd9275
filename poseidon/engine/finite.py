"""Noticing numbers that are not finite: in the loss of each pass, and in what a snapshot would hold.

Law: a look costs next to nothing while all is well. On the CPU each pass's loss is looked at before its backward pass, so nothing
that follows from it leaves the worker; on a GPU a few times a second, so that the device is not waited for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.errors import JobError
from poseidon.net.net import Net

LOGGER = logging.getLogger(__name__)
LOOK_S = 0.25
REMEDY = "a lower base_lr or clip_gradients may help; --on_nan=warn goes on regardless"


class LossWatch:
    """Looks at the losses of one worker.

    Args:
        net: the train net, of which the layer is named where the first such output came from.
        rank: this worker.
        stop: raise; else warn, once.
        deferred: look a few times a second only; on a GPU.
    """

    def __init__(self, net: Net, *, rank: int, stop: bool, deferred: bool) -> None:
        self._net = net
        net.keep_data = True
        self._rank = rank
        self._stop = stop
        self._deferred = deferred
        self._unseen: list[tuple[int, Tensor]] = []
        self._looked_s = time.monotonic()
        self._told = False

    def see(self, iteration: int, loss: Tensor) -> None:
        """A forward pass of an iteration has given a loss.

        Raises:
            JobError: it, or one before it, is not finite.
        """
        if not self._deferred:
            if not math.isfinite(loss.item()):
                self._tell(iteration, loss.item())
            return
        self._unseen.append((iteration, loss.detach()))
        if time.monotonic() - self._looked_s >= LOOK_S:
            self.look()

    def look(self) -> None:
        """Look at all losses so far.

        Raises:
            JobError: one is not finite.
        """
        self._looked_s = time.monotonic()
        unseen, self._unseen = self._unseen, []
        values = torch.stack([loss for _, loss in unseen]).tolist() if unseen else []
        for (iteration, _), value in zip(unseen, values, strict=True):
            if not math.isfinite(value):
                self._tell(iteration, value)
                return

    def _tell(self, iteration: int, value: float) -> None:
        if self._told:
            return
        self._told = True
        words = f"worker {self._rank}: the loss of iteration {iteration} is {value:g}; {self._net.first_not_finite()}"
        if self._stop:
            raise JobError(f"{words}; {REMEDY}")
        LOGGER.warning("%s; training goes on (--on_nan=warn), without snapshots of such weights", words)


def not_finite(named: Sequence[tuple[str, Sequence[NDArray[np.float32]]]]) -> str:
    """The first name with an array that holds a number that is not finite; empty: there is none."""
    return next((name for name, arrays in named if not all(map(_is_finite, arrays))), "")


def _is_finite(array: NDArray[np.float32]) -> bool:
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        # One pass at the speed of the memory; what overflows in it is looked at number by number.
        return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())
