"""The contract of a carrier: what moves some tensors of an exchange among the replicas.

`Exchange` makes the calls, in the order that its module has, and says what may be done with a tensor
in between. A tensor has the same index in every carrier as in the exchange. All calls come from one
thread, save for `traffic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from torch import Tensor

from poseidon.exchange.base import History
from poseidon.exchange.carrier_state import CarrierState
from poseidon.exchange.observer import Traffic


class Step(NamedTuple):
    """One iteration: its number, and the rates in it (`Trained.rate_index`)."""

    iteration: int
    rates: tuple[float, ...]


class Carrier:
    """Moves some tensors of an exchange, each by its gradient or by its factors. All calls but those
    two do nothing unless they are overridden.

    Attributes:
        by_factors: the tensors whose factors it takes. They do not change.
        state: what a snapshot holds of it.
    """

    indices: Sequence[int]
    by_factors: AbstractSet[int] = frozenset()
    state: CarrierState

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        """See `Exchange.open`; the histories are of all tensors of the exchange."""

    def start(self, step: Step) -> None:
        """Begin an iteration."""

    def begin(self, index: int, gradient: Tensor) -> None:
        """Send a gradient, or the values of statistics, which are read until the tensor's next
        `wait`. Several virtual workers: called for each node of the process with its sum, from left
        to right (`VirtualWorkers.nodes`).
        """
        raise NotImplementedError

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Send factors. On the host they are copied; on a device they are read until `finish`."""
        raise NotImplementedError

    def release(self, index: int) -> None:
        """Take over a tensor whose factors have begun: its layer does not use it any more."""

    def wait(self, index: int) -> None:
        """Return once a tensor may be used, in this iteration or, after `finish`, in the next."""

    def held_squares(self) -> Sequence[float]:
        """Return numbers whose exact sum is the sum of squares of the gradients that wait for the
        limit of `finish`. Called once before it, where there is a limit on their norm.
        """
        return ()

    def finish(self, limit: float) -> None:
        """End the iteration; `limit` multiplies the gradients that waited for it. A tensor that has
        not begun has a gradient of zero.
        """

    def settle(self, clock: int) -> None:
        """Bring every tensor to the state after `clock` iterations of all replicas."""

    def close(self) -> None:
        """Leave. A second call does nothing."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the traffic so far by tensor, where it is counted. Any thread may call this."""
        return {}
