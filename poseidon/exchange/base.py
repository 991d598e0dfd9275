"""The contract between a training loop and whatever keeps the replicas together.

One iteration, seen from the loop:

    exchange.start(iteration, rate)
    for each layer, bottom up:   exchange.wait(its tensors)     -> forward
    for each layer, top down:    backward -> exchange.begin(a tensor, its gradient)
                                 or exchange.begin_factors(...), backward of the layer, exchange.release(...)
    exchange.finish()

Law: after `wait(k)` in iteration t, tensor k holds every replica's updates of iterations < t - s, s its
staleness, and this replica's own. `begin` returns at once; the gradient is read in the background and must not
be written to before the tensor's next `wait`. A tensor that got no gradient in an iteration counts as zero.
The tensors' own memory is updated in place, so modules never see a new tensor: from `begin` (with factors: from
`release`) to the next `wait` it belongs to the exchange, which may change it at any moment.

A tensor whose `takes_factors` holds gets no gradient: `begin_factors` brings u (rows x N) and v (rows x M) of its
layer, whose product u^T v (N x M, the tensor's shape) is the gradient. They are copied before it returns.

Statistics are tensors that the module's own forward moves (BatchNorm): they have no gradient and never `begin`.
`finish` takes what they have become; after the next `wait` they hold the mean over the replicas, at staleness > 0 what
the replicas moved them, each by 1/W. Rates, rules, scales and limits do not touch them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ps_server import Rule, Signal, SignalKind

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One tensor that the exchange keeps together.

    Args:
        name: for messages to people.
        tensor: the parameter, or statistics; float32, contiguous; updated in place.
        rule: how its values follow from its gradients.
        factor_rows: rows of u and v in an iteration, where its gradient is u^T v of one layer's output gradient and
            input; 0 where it is not. Decides nothing but the cost; the rows may differ from iteration to iteration.
        statistics: the module's forward moves it.
    """

    name: str
    tensor: Tensor
    rule: Rule = field(default_factory=Rule)
    factor_rows: int = 0
    statistics: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """What is common to all tensors of a job.

    Args:
        clip: largest L2 norm of all gradients together; None: no limit.
        gradient_scale: multiplies the gradients after the limit (1 / iter_size).
        start_clock: the iteration that the tensors' values stand at; > 0 when a run is resumed.
        mends: replicas may differ, since they are mended (`ReplicaCheck`): processors need not compute the same bits.
    """

    clip: float | None = None
    gradient_scale: float = 1.0
    start_clock: int = 0
    mends: bool = False


History = Sequence[Array]
"""A tensor's history arrays, each of the tensor's shape: what a solverstate holds for it."""

Ask = Callable[[], "tuple[bytes, ...] | None"]


class Exchange(Protocol):
    """See the module's head for the order of calls."""

    def open(self, histories: Sequence[History] | None) -> None:
        """Bring every replica to the same first values: those of rank 0.

        Args:
            histories: for each tensor the history to go on from (a resumed run); None: all zero.
        """

    def reopen(self, histories: Sequence[History] | None, clock: int) -> None:
        """Open once more, from what the tensors are now: a saved state was loaded into them.

        All replicas call it together, after `open` and before their first iteration.

        Args:
            histories: as for `open`, on every replica.
            clock: the iteration that the tensors' values stand at; the next `start` is of this one.
        """

    def start(self, iteration: int, rate: float) -> None:
        """Begin an iteration. `rate` is the solver's rate in it."""

    def begin(self, index: int, gradient: Tensor) -> None:
        """Tensor `index` has its whole gradient of this iteration; send it on its way."""

    def takes_factors(self, index: int) -> bool:
        """Whether tensor `index` comes by `begin_factors`, never by `begin`; does not change."""

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Tensor `index` has its factors of this iteration; send them on their way. The tensor is still in use."""

    def release(self, index: int) -> None:
        """Tensor `index`, whose factors have begun, is not used any more in this iteration."""

    def wait(self, index: int) -> None:
        """Return once tensor `index` may be used."""

    def finish(self) -> None:
        """End the iteration: every gradient there is has begun."""

    def settle(self) -> None:
        """Bring every tensor to the state after all replicas' finished iterations.

        All replicas call it together, after the same number of iterations.
        """

    def histories(self) -> list[History]:
        """Each tensor's history, after `settle`; on rank 0."""

    def replicated_state(self) -> Mapping[str, Tensor]:
        """What this exchange keeps equal on all replicas beside the tensors, by name: live tensors, after `settle`."""

    def gather(self, payload: bytes) -> Ask:
        """Collect small payloads from all replicas: gives a function that returns all by rank, or None so far."""

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        """Wait for a collection."""

    def signal(self, kind: SignalKind) -> None:
        """Rank 0: ask all replicas for something, at the end of an iteration that all reach together."""

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What rank 0 has asked for so far; `clock` is the number of finished iterations to do it at."""

    def close(self) -> None:
        """Leave. Safe to call twice."""


class WholeGradients(ABC):
    """What the exchanges share in which every tensor comes by `begin`."""

    @abstractmethod
    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""

    def takes_factors(self, index: int) -> bool:
        """See `Exchange`."""
        return False

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self.begin(index, u_KN.t() @ v_KM)

    def release(self, index: int) -> None:  # noqa: B027 - nothing to do: `begin` hands the tensor over
        """See `Exchange`."""
