"""PowerSGD: a matrix travels as two thin ones whose product is near it (Vogels et al., NeurIPS 2019, algorithms 1 and 2).

For a tensor as an n x m matrix, its mean over the workers in two rounds through the shards:

    M = gradient + what was held back          on each worker
    P = M Q              n x r                 pushed; the shards average
    P = orthonormal columns of the mean P      on each worker, with the same bits
    Q = M^T P            m x r                 pushed; the shards average
    mean gradient = P Q^T; held back = M - P Q^T; Q is where the next iteration starts

The second round belongs to the same iteration: `wait_early` returns when the mean of P has come, before the clock moves. The
P of all tensors are under way together. P and Q are tables of their own (`RuleKind.MEAN`). The tensor's own table is a copy,
which brings the first value to all workers; its rule runs on each worker.

Before the iteration `start` the mean gradient itself is a third table of means. In each iteration all workers skip the tables
that they do not use (`ps_server.Client.skip`).

Laws:

* All workers compute the same bits from the same means: `orthonormal` and the product use elementwise operations in a fixed
  order alone.
* A column of Q that is zero would stay so. It starts again from the first, random one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import (
    Array,
    Exchange,
    ExchangeSettings,
    ExchangeState,
    History,
    Trained,
    WholeGradients,
)
from poseidon.exchange.observe.statistics import CountsTraffic, Traffic
from ps_server import Rule, RuleKind
from ps_server.rules import history_count, sum_of_squares, update

POWERSGD = "powersgd"
LEAST_RATE = 2
"""PowerSGD is for tensors of which it sends this many times fewer bytes, as in torch's hook (min_compression_rate)."""
TILE_ELEMENTS = 128 * 1024
"""Elements of the product that are computed at a time."""
DEPENDENT = 1e-6
"""A column of which less is left without its projections on the columns before it is taken as 0."""


class EarlyExchange(Exchange, CountsTraffic, Protocol):
    """An exchange through the shards, whose means can be read in the iteration that they are of."""

    def skip(self, index: int) -> None:
        """Leave tensor `index`, a mean, as it is in this iteration, in place of `begin`; all replicas do."""

    def wait_early(self, index: int) -> None:
        """Return once tensor `index`, which has begun, has the value that follows from this iteration."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """PowerSGD of a tensor: a matrix as the product of two thin ones.

    Attributes:
        rank: their columns; at least 1.
        start: the first iteration in which it is used; before it the gradient travels as it is.
    """

    rank: int
    start: int = 0

    def __str__(self) -> str:
        return f"{POWERSGD}:{self.rank}" + (f":start={self.start}" if self.start else "")

    def elements(self, tensor: Tensor) -> int:
        """Return the number of elements that are sent of a tensor in one direction, once it has started."""
        n, m = matrix_shape(tensor)
        return self.rank * (n + m)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether it makes a tensor enough smaller."""
        return tensor.dim() > 1 and LEAST_RATE * self.elements(tensor) <= tensor.numel()


def low_rank_tensors(tensors: Sequence[Trained], chosen: Mapping[int, LowRank]) -> dict[int, list[Trained]]:
    """Return P and Q of each tensor that travels so, with means as values; also G, the gradient, where it starts later.

    Args:
        tensors: all of them.
        chosen: those that travel so, by index.
    """
    found = {}
    for index, how in chosen.items():
        trained = tensors[index]
        n, m = matrix_shape(trained.tensor)
        numbers = torch.Generator().manual_seed(index)
        q = torch.randn(m, how.rank, generator=numbers, dtype=torch.float32, device="cpu")
        parts = {"P": torch.zeros(n, how.rank), "Q": q, **({"G": torch.zeros(n, m)} if how.start else {})}
        found[index] = [
            Trained(
                name=f"{trained.name}, {name}",
                tensor=part.to(trained.tensor.device),
                rule=Rule(kind=RuleKind.MEAN),
            )
            for name, part in parts.items()
        ]
    return found


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return n and m of a tensor as a matrix: its first axis, and all others together."""
    return tensor.shape[0], tensor[0].numel()


class LowRankExchange(WholeGradients):
    """See `Exchange`.

    Args:
        inner: the exchange of all `factors` in their order, then of `tensors`, of which those that have factors are copies;
            this exchange closes it.
        tensors: what to keep together.
        factors: made by `low_rank_tensors`.
        chosen: how each of these tensors travels, by index.
        settings: common to all tensors; without a limit of the norm.
    """

    def __init__(
        self,
        inner: EarlyExchange,
        tensors: Sequence[Trained],
        factors: Mapping[int, Sequence[Trained]],
        chosen: Mapping[int, LowRank],
        settings: ExchangeSettings,
    ) -> None:
        self._inner = inner
        self._scale = settings.gradient_scale
        self._first = 0
        self._matrices: dict[int, _Matrix] = {}
        for index, parts in factors.items():
            own = [part.tensor for part in parts]
            self._matrices[index] = _Matrix(tensors[index], self._first, own, chosen[index].start)
            self._first += len(parts)
        self._rate, self._iteration = 0.0, settings.start_clock
        self.by_factors = frozenset(index - self._first for index in inner.by_factors)
        self.state = LowRankState(inner.state, self._matrices, self._first)
        self.control = inner.control

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        self.state.restore(histories)
        self._inner.open(histories and [*[()] * self._first, *histories], clock)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._inner.start(iteration, rate)
        self._iteration, self._rate = iteration, rate

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        matrix = self._matrices.get(index)
        if matrix is None:
            self._inner.begin(index + self._first, gradient)
        else:
            self.wait(index)
            if self._iteration < matrix.start:
                self._inner.begin(matrix.place + 2, matrix.take_exact(gradient.detach()))
            else:
                self._inner.begin(matrix.place, matrix.take(gradient.detach(), self._scale))

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        if index in self.by_factors:
            self._inner.begin_factors(index + self._first, u_KN, v_KM)
        else:
            super().begin_factors(index, u_KN, v_KM)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        self._inner.release(index + self._first)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        matrix = self._matrices.get(index)
        if matrix is None:
            self._inner.wait(index + self._first)
        elif matrix.is_due:
            self._inner.wait(matrix.place + (2 if matrix.is_exact else 1))
            matrix.apply()

    def finish(self) -> None:
        """See `Exchange`."""
        for index, matrix in self._matrices.items():
            if not matrix.begun:
                self.begin(index, torch.zeros_like(matrix.value))
        for matrix in self._matrices.values():
            matrix.end(self._rate, self._iteration)
            if matrix.is_exact:
                self._inner.skip(matrix.place)
                self._inner.skip(matrix.place + 1)
                continue
            self._inner.wait_early(matrix.place)
            self._inner.begin(matrix.place + 1, matrix.second(self._scale))
            if matrix.start:
                self._inner.skip(matrix.place + 2)
        self._inner.finish()

    def settle(self) -> None:
        """See `Exchange`."""
        self._inner.settle()
        for matrix in self._matrices.values():
            if matrix.is_due:
                matrix.apply()

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`. The bytes of a tensor are those of its P and Q."""
        inner = self._inner.traffic()
        found = {i - self._first: traffic for i, traffic in inner.items() if i >= self._first}
        for index, matrix in self._matrices.items():
            parts = [inner[matrix.place + part] for part in range(3 if matrix.start else 2)]
            found[index] = Traffic(
                bytes_out=sum(part.bytes_out for part in parts),
                bytes_in=sum(part.bytes_in for part in parts),
                on_way_s=sum(part.on_way_s for part in parts),
                held_back=math.sqrt(sum_of_squares(matrix.held_back)),
            )
        return found

    def close(self) -> None:
        """See `Exchange`."""
        self._inner.close()


class LowRankState:
    """See `ExchangeState`.

    Args:
        inner: the state of the inner exchange.
        matrices: by the index of the tensor.
        first: the index of the first tensor in the inner exchange.
    """

    private = False

    def __init__(self, inner: ExchangeState, matrices: Mapping[int, _Matrix], first: int) -> None:
        self._inner = inner
        self._matrices = matrices
        self._first = first
        self._held_back: Mapping[str, Array] = {}

    def histories(self) -> list[History]:
        """See `ExchangeState`."""
        found = self._inner.histories()[self._first :]
        for index, matrix in self._matrices.items():
            found[index] = [part.cpu().numpy().reshape(matrix.shape).copy() for part in matrix.history]
        return found

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        own = {
            f"{matrix.name}, history {number}": history
            for matrix in self._matrices.values()
            for number, history in enumerate(matrix.history)
        }
        return {**self._inner.replicated(), **own}

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        found = dict(self._inner.held_back())
        for matrix in self._matrices.values():
            for name, tensor in matrix.kept():
                found[name] = tensor.reshape(-1).cpu().numpy().copy()
        return found

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""
        for matrix in self._matrices.values():
            for name, tensor in matrix.kept():
                if name in held_back and held_back[name].size != tensor.numel():
                    raise SnapshotError(
                        f"the snapshot has {held_back[name].size} elements of {name}; expected {tensor.numel()}: "
                        "the rank of --compress=powersgd:RANK is another, or the module"
                    )
        self._inner.hold_back(held_back)
        self._held_back = held_back

    def restore(self, histories: Sequence[History] | None) -> None:
        """Continue from these histories, and from what `hold_back` was given since the last call; from zeros without."""
        for index, matrix in self._matrices.items():
            matrix.reset(histories[index] if histories else ())
            for name, tensor in matrix.kept():
                if name in self._held_back:
                    tensor.copy_(torch.from_numpy(self._held_back[name]).view(tensor.shape))
        self._held_back = {}


class _Matrix:
    """One tensor that travels as P and Q.

    Args:
        trained: the tensor.
        place: the index of P in the inner exchange; that of Q is one more, and that of G two.
        parts: its mean P, n x r, its mean Q, m x r, and if it starts later its mean gradient G.
        start: `LowRank.start`.
    """

    def __init__(self, trained: Trained, place: int, parts: Sequence[Tensor], start: int) -> None:
        self.name = trained.name
        self.place = place
        self.shape = tuple(trained.tensor.shape)
        self.value = trained.tensor.detach().view(matrix_shape(trained.tensor))
        self.held_back = torch.zeros_like(self.value)
        """What was not sent; while an iteration is under way M."""
        self.history = [
            torch.zeros_like(self.value.view(-1)) for _ in range(history_count(trained.rule.kind))
        ]
        self.start = start
        self.begun = self.is_due = self.is_exact = False
        self._rule = trained.rule
        self._p, self._q = parts[:2]
        self._exact = parts[2] if start else None
        self._first_q = self._q.clone()
        self._basis = torch.zeros_like(self._p)
        self._rate, self._iteration = 0.0, 0

    def reset(self, history: History) -> None:
        """Begin with this history, and nothing held back."""
        self.begun = self.is_due = False
        self.held_back.zero_()
        self._q.copy_(self._first_q)
        for number, tensor in enumerate(self.history):
            if number < len(history):
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(history[number], np.float32)).view(-1))
            else:
                tensor.zero_()

    def kept(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that a snapshot holds, by name."""
        return [(f"{self.name}, lost", self.held_back), (f"{self.name}, Q", self._q)]

    def take_exact(self, gradient: Tensor) -> Tensor:
        """Return this worker's G."""
        self.begun = True
        return gradient.reshape(self.value.shape)

    def take(self, gradient: Tensor, scale: float) -> Tensor:
        """Return this worker's P."""
        self.begun = True
        self.held_back.add_(gradient.reshape(self.value.shape), alpha=scale)
        return self.held_back @ self._q

    def end(self, rate: float, iteration: int) -> None:
        """End an iteration: the rule is due once the mean of Q or G has come."""
        self.begun, self.is_due, self.is_exact = False, True, iteration < self.start
        self._rate, self._iteration = rate, iteration

    def second(self, scale: float) -> Tensor:
        """Return this worker's Q, once the mean of P has come. The shards multiply its mean by `scale`."""
        self._basis.copy_(torch.from_numpy(orthonormal(self._p.cpu().numpy())))
        own = self.held_back.t() @ self._basis
        return own if scale == 1.0 else own.div_(scale)

    def apply(self) -> None:
        """Apply the rule to the mean gradient, once the mean of Q or G has come."""
        self.is_due = False
        n, m = self.value.shape
        step = max(1, TILE_ELEMENTS // m)
        histories = [history.view(n, m) for history in self.history]
        for start in range(0, n, step):
            rows = slice(start, start + step)
            product = self._mean(rows)
            history = [part[rows].reshape(-1) for part in histories]
            value = self.value[rows].reshape(-1)
            update(self._rule, product.view(-1), history, value, rate=self._rate, step=self._iteration)
        empty = (self._q == 0).all(dim=0)
        self._q.copy_(torch.where(empty, self._first_q, self._q))

    def _mean(self, rows: slice) -> Tensor:
        """Return rows of the mean gradient, and take them from what is held back."""
        if self.is_exact and self._exact is not None:
            return self._exact[rows].clone()
        product = self._basis[rows, :1] * self._q[:, 0]
        for column in range(1, self._q.shape[1]):
            product.add_(self._basis[rows, column : column + 1] * self._q[:, column])
        self.held_back[rows].sub_(product)
        return product


def orthonormal(p: Array) -> Array:
    """Return orthonormal columns that span those of an n x r matrix (Gram-Schmidt); zeros for columns that depend on others.

    All processors compute the same bits: sums are of float64, in a fixed order.
    """
    columns = p.T.astype(np.float64)
    for number, column in enumerate(columns):
        before = _norm(column)
        for _ in range(2):  # once more for what rounding has left (Björck, BIT 1967)
            for earlier in columns[:number]:
                column -= _sum(earlier * column) * earlier
        left = _norm(column)
        if left == 0 or left <= DEPENDENT * before:
            column[:] = 0
        else:
            column /= left
    return np.ascontiguousarray(columns.T, np.float32)


def _norm(column: NDArray[np.float64]) -> float:
    return math.sqrt(_sum(column * column))


def _sum(numbers: NDArray[np.float64]) -> float:
    while (size := numbers.size) > 1:
        half = size // 2
        numbers = np.concatenate([numbers[:half] + numbers[size - half :], numbers[half : size - half]])
    return float(numbers[0])
