"""Checks for numbers that are not finite, in the loss of each pass and in the contents of a snapshot;
and scaled losses, for gradients in float16, which has no numbers between 0 and 6e-8.

A loss is multiplied by a power of two, and gradients are divided by it again before they leave, as
float32. Micikevicius et al., Mixed Precision Training, 2018; the constants are torch's.

Laws:

* No gradient leaves before all workers know that all gradients of the iteration are finite. If one
  is not, all of them drop all of it, halve the scale, and repeat the iteration with their next
  batches: so each iteration updates the weights, and the exchange sees none of it.
* What is dropped leaves no trace in statistics. Readers and random generators have moved on.
* The scale is a part of the state.
* A check of finite numbers costs almost nothing. On the CPU each pass's loss is checked before its
  backward pass, so nothing computed from it leaves the worker. On a GPU losses are checked a few
  times a second, so that the loop does not wait for the device.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.net.net import Net
from poseidon.engine.leaf import Leaf
from poseidon.errors import JobError
from poseidon.exchange.base import Trained
from poseidon.exchange.exchange import Exchange

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
        """Raise JobError if a loss so far is not finite."""
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


FIRST, LEAST, MOST = 2.0**16, 2.0**-16, 2.0**24
GROWS_AFTER = 2000
"""Iterations without a gradient that is not finite, after which the scale doubles."""
FINITE, NOT_FINITE = b"\1", b"\0"


class LossScale:
    """The scale, and the gradients of an iteration until they leave; it stands between the hooks of
    the nets and the exchange (`Receiver` of `poseidon/exchange/hooks.py`).

    Attributes:
        factor: of the losses.
    """

    def __init__(self, exchange: Exchange, tensors: Sequence[Trained]) -> None:
        self.by_factors = exchange.by_factors
        self.factor = FIRST
        self._exchange = exchange
        self._statistics = {
            index: trained.tensor.detach()
            for index, trained in enumerate(tensors)
            if trained.statistics
        }
        self._since = 0
        self._held: list[Callable[[], None]] = []
        self._finite: list[Tensor] = []
        self._first: dict[int, Tensor] = {}

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss whose gradients this object takes."""
        return loss * self.factor

    def wait(self, index: int) -> None:
        """Wait for a tensor; keep the first values of statistics."""
        self._exchange.wait(index)
        if index in self._statistics:
            self._first.setdefault(index, self._statistics[index].clone())

    def begin(self, index: int, gradient: Tensor) -> None:
        """Take a gradient, which it may write to."""
        self._finite.append(gradient.isfinite().all())
        gradient.mul_(1 / self.factor)
        self._held.append(partial(self._exchange.begin, index, gradient))

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Take the factors of a gradient."""
        self._finite += [u_KN.isfinite().all(), v_KM.isfinite().all()]
        own = u_KN / self.factor, v_KM.clone()
        self._held.append(partial(self._exchange.begin_factors, index, *own))

    def release(self, index: int) -> None:
        """Take over a tensor whose factors have begun."""
        self._held.append(partial(self._exchange.release, index))

    def next_virtual_worker(self) -> None:
        """End the turn of a virtual worker that is not this process's last one."""
        values = self._values()
        self._held.append(partial(self._end_turn, values))
        self._write(self._first)

    def _end_turn(self, values: dict[int, Tensor]) -> None:
        self._write(values)
        self._exchange.next_virtual_worker()

    def agree(self, iteration: int) -> bool:
        """Send the gradients if those of all workers are finite, else drop them and halve the scale.
        All workers call it together, after the last backward pass of an iteration.

        Raises:
            JobError: they are not finite with the least scale either.
        """
        finite = all(torch.stack(self._finite).tolist()) if self._finite else True
        self._finite.clear()
        control = self._exchange.control
        agreed = NOT_FINITE not in control.all_gather(FINITE if finite else NOT_FINITE)
        if agreed:
            self._send()
            self._first.clear()
            self._since += 1
            if self._since >= GROWS_AFTER:
                self.factor, self._since = min(2 * self.factor, MOST), 0
        else:
            self._write(self._first)
            self.factor, self._since = self.factor / 2, 0
        self._held.clear()
        if self.factor < LEAST:
            raise JobError(
                f"the gradients of iteration {iteration} are not finite in float16, whatever the "
                f"loss is multiplied by; --precision=bfloat16 has a larger range; {REMEDY}"
            )
        if not agreed and control.root:
            LOGGER.info(
                "iteration %d is repeated with the next batch, because a gradient was not finite in "
                "float16: losses are multiplied by %g from here on",
                iteration,
                self.factor,
            )
        return agreed

    def _send(self) -> None:
        last = self._values()
        for call in self._held:
            call()
        self._write(last)

    def _values(self) -> dict[int, Tensor]:
        return {index: value.clone() for index, value in self._statistics.items()}

    def _write(self, values: dict[int, Tensor]) -> None:
        for index, value in values.items():
            self._statistics[index].copy_(value)

    def leaf(self) -> Leaf:
        """Return the scale as a leaf of a state."""
        return Leaf.shared("loss_scale", lambda: [self.factor, self._since], self._load)

    def _load(self, saved: tuple[float, int] | None) -> None:
        if saved is not None:
            self.factor, self._since = saved
