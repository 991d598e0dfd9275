"""The contract of an exchange, which keeps the replicas of a job together.

`Exchange` moves gradients and values. Two parts of it have contracts of their own: `Exchange.state` is what a snapshot
holds, and `Exchange.control` (`control.py`) carries collections among all workers, and rank 0's requests to them.

One iteration of a training loop:

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

A tensor in `by_factors` gets no gradient: `begin_factors` brings u (rows x N) and v (rows x M) of its layer, whose
product u^T v (N x M, the tensor's shape) is the gradient. They are copied before it returns.

Statistics are tensors that the forward pass of the module changes (BatchNorm). They have no gradient and never `begin`.
`finish` takes their values. After the next `wait` they hold the mean over the replicas; at staleness > 0 they have
moved by 1/W of each replica's change. Rates, rules, scales and limits do not apply to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.exchange.control import JobControl
from ps_server import Rule
from ps_server.rules import history_count

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One tensor that the exchange keeps equal on all replicas.

    Args:
        name: for messages.
        tensor: the parameter, or statistics; float32, contiguous; updated in place.
        rule: how its values follow from its gradients.
        factor_rows: rows of u and v in an iteration, where its gradient is u^T v of one layer's output gradient and
            input; 0 where it is not. It is used for the cost only: the rows may differ from iteration to iteration.
        statistics: whether the module's forward pass changes it.
    """

    name: str
    tensor: Tensor
    rule: Rule = field(default_factory=Rule)
    factor_rows: int = 0
    statistics: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """The settings that are common to all tensors of a job.

    Args:
        clip: largest L2 norm of all gradients together; None: no limit.
        gradient_scale: multiplies the gradients after the limit (1 / iter_size).
        start_clock: number of finished iterations that the tensors' values have; > 0 when a run is resumed.
    """

    clip: float | None = None
    gradient_scale: float = 1.0
    start_clock: int = 0


History = Sequence[Array]
"""A tensor's history arrays, each of the tensor's shape: what a solverstate holds for it."""


class Exchange(Protocol):
    """Keep the tensors of all replicas together. The module's docstring has the order of calls."""

    @property
    def by_factors(self) -> AbstractSet[int]:
        """Indices of the tensors that come by `begin_factors`, never by `begin`. They do not change."""

    @property
    def state(self) -> ExchangeState:
        """What a snapshot holds beside the tensors."""

    @property
    def control(self) -> JobControl:
        """Collections among all workers, and requests of rank 0."""

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """Bring every replica to the same first values: those of rank 0.

        All replicas call it together, and a second time, with `clock`, where a saved state was loaded into the
        tensors after the first time. No iteration may lie between the two.

        Args:
            histories: for each tensor the history to continue from (a resumed run); None: all zero.
            clock: number of finished iterations that the tensors' values have: the iteration of the next `start`. None
                at the first call, for which `ExchangeSettings.start_clock` has it.
        """

    def start(self, iteration: int, rate: float) -> None:
        """Begin an iteration. `rate` is the solver's rate in it."""

    def begin(self, index: int, gradient: Tensor) -> None:
        """Send the gradient of tensor `index`, which is whole in this iteration."""

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Send the factors of tensor `index` in this iteration. The layer still uses the tensor."""

    def release(self, index: int) -> None:
        """Hand over tensor `index`, whose factors have begun: the layer does not use it any more in this iteration."""

    def wait(self, index: int) -> None:
        """Return once tensor `index` may be used."""

    def finish(self) -> None:
        """End the iteration. A tensor that has not begun has a gradient of zero."""

    def settle(self) -> None:
        """Bring every tensor to the state after all replicas' finished iterations.

        All replicas call it together, after the same number of iterations.
        """

    def close(self) -> None:
        """Leave. A second call does nothing."""


class ExchangeState(Protocol):
    """What a snapshot holds of an exchange beside the tensors. It may be read after `Exchange.settle`."""

    @property
    def private(self) -> bool:
        """Whether each host has histories of its own (staleness > 0), or all replicas share one."""

    def histories(self) -> list[History]:
        """Return each tensor's history.

        Private histories: all replicas call it together, and each gets those of its host. A shared history: only
        rank 0 calls it.

        Raises:
            LocalProtocolError: the history is shared, and this worker does not exchange with other hosts itself.
        """

    def replicated(self) -> Mapping[str, Tensor]:
        """Return what the exchange keeps equal on all replicas beside the tensors: live tensors by name."""

    def held_back(self) -> Mapping[str, Array]:
        """Return what lossy codecs have held back, flat and by name; empty without codecs, and on followers of a host.

        It is private to each host. That of rank 0 has what the shards hold back, too.
        """

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """Continue at the next `open` from what `held_back` has returned, its histories given. Other names are ignored.

        Raises:
            SnapshotError: an array has another size than its tensor.
        """


class NothingHeldBack:
    """The part of `ExchangeState` of an exchange that sends all digits."""

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        return {}

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""


class WholeGradients(ABC):
    """An exchange in which every tensor comes by `begin`."""

    by_factors: AbstractSet[int] = frozenset()

    @abstractmethod
    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self.begin(index, u_KN.t() @ v_KM)

    def release(self, index: int) -> None:  # noqa: B027 - nothing to do: `begin` hands the tensor over
        """See `Exchange`."""


class LocalHistories(NothingHeldBack):
    """The state of an exchange in which each replica applies the rule to the mean gradient, and keeps the history.

    Args:
        tensors: one history each.
        replicated: whether other replicas keep the same history.
    """

    private = False

    def __init__(self, tensors: Sequence[Trained], *, replicated: bool) -> None:
        self._tensors = tensors
        self._replicated = replicated
        self.of = [
            [torch.zeros_like(t.tensor.detach().view(-1)) for _ in range(history_count(t.rule.kind))]
            for t in tensors
        ]
        """For each tensor its flat history tensors."""

    def load(self, histories: Sequence[History] | None) -> None:
        """Continue from `histories`, as for `Exchange.open`: from zeros where there are none."""
        if not histories:
            for tensor in chain.from_iterable(self.of):
                tensor.zero_()
            return
        for own, history in zip(self.of, histories, strict=True):
            for tensor, array in zip(own, history, strict=True):
                tensor.copy_(torch.from_numpy(array).reshape(-1))

    def histories(self) -> list[History]:
        """See `ExchangeState`."""
        return [
            [tensor.detach().cpu().numpy().reshape(trained.tensor.shape).copy() for tensor in history]
            for trained, history in zip(self._tensors, self.of, strict=True)
        ]

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        if not self._replicated:
            return {}
        return {
            f"{trained.name}, history {number}": tensor
            for trained, history in zip(self._tensors, self.of, strict=True)
            for number, tensor in enumerate(history)
        }
