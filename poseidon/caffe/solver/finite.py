"""Checks for numbers that are not finite: in the loss of each pass, and in the contents of a
snapshot.

Law: a check of finite numbers costs almost nothing. On the CPU each pass's loss is checked before
its backward pass, so nothing computed from it leaves the worker. On a GPU losses are checked a few
times a second, so that the loop does not wait for the device.
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

from poseidon.caffe.net.net import Net
from poseidon.errors import JobError

LOGGER = logging.getLogger(__name__)
CHECK_S = 0.25
REMEDY = "a lower base_lr or clip_gradients may help; --on_nan=warn continues anyway"


class LossCheck:
    """Checks the losses of one virtual worker.

    Args:
        net: its train net; the message names its first layer with such an output.
        name: of the virtual worker, for the message.
        stop: raise an error; otherwise warn once.
        deferred: check a few times a second only; on a GPU.
    """

    def __init__(self, net: Net, *, name: str, stop: bool, deferred: bool) -> None:
        self._net = net
        net.keep_data = True
        self._name = name
        self._stop = stop
        self._deferred = deferred
        self._unchecked: list[tuple[int, Tensor]] = []
        self._checked_s = time.monotonic()
        self._reported = False

    def add(self, iteration: int, loss: Tensor) -> None:
        """Add the loss of a forward pass.

        Raises:
            JobError: it, or one before it, is not finite.
        """
        if not self._deferred:
            if not math.isfinite(loss.item()):
                self._report(iteration, loss.item())
            self._net.drop_data()
            return
        self._unchecked.append((iteration, loss.detach()))
        if time.monotonic() - self._checked_s >= CHECK_S:
            self.check()

    def check(self) -> None:
        """Check all losses so far.

        Raises:
            JobError: one is not finite.
        """
        self._checked_s = time.monotonic()
        unchecked, self._unchecked = self._unchecked, []
        values = torch.stack([loss for _, loss in unchecked]).tolist() if unchecked else []
        for (iteration, _), value in zip(unchecked, values, strict=True):
            if not math.isfinite(value):
                self._report(iteration, value)
                return

    def _report(self, iteration: int, value: float) -> None:
        if self._reported:
            return
        self._reported = True
        text = (
            f"{self._name}: the loss of iteration {iteration} is {value:g}; "
            f"{self._net.first_not_finite()}"
        )
        if self._stop:
            raise JobError(f"{text}; {REMEDY}")
        LOGGER.warning(
            "%s; training continues (--on_nan=warn), without snapshots of such weights", text
        )


def not_finite(named: Sequence[tuple[str, Sequence[NDArray[np.float32]]]]) -> str:
    """Return the first name with an array that has a number that is not finite; empty if there
    is none.
    """
    return next((name for name, arrays in named if not all(map(_is_finite, arrays))), "")


def _is_finite(array: NDArray[np.float32]) -> bool:
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        # One pass at the speed of the memory. If the product overflows, every number is checked.
        return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())
