"""One tensor that travels by PowerSGD: its factors, what it holds back, and the rule.

`server/low_rank.py` has the two rounds.

P and Q are kept with a row for each of their columns, so that the blocks of a codec have elements
of one column.

Laws:

* All workers compute the same bits from the same means: `orthonormal` and the product use
  elementwise operations in a fixed order alone.
* A column of Q that is zero would stay so. It starts again from the first, random one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.exchange.base import Array, Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.device import DONE, Event, device_of
from poseidon.exchange.ruled import RuledTensor
from ps_server import Codec, Rule, RuleKind, native
from ps_server.rules import update

ELEMENT_BYTES = 4
POWERSGD = "powersgd"
LEAST_RATE = 2
"""PowerSGD is for tensors of which it sends this many times fewer bytes, as in torch's hook
(min_compression_rate).
"""
SHARED_ELEMENTS = 16 * 1024
"""Of P or Q of tensors that share tables: 64 KiB, a quarter of a packet."""
TILE_ELEMENTS = 128 * 1024
"""Elements of the product that are computed at a time."""
DEPENDENT = 1e-6
"""A column of which less is left without its projections on the columns before it is taken as 0."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """PowerSGD of a tensor: a matrix as the product of two thin ones.

    Attributes:
        rank: their columns; at least 1.
        start: the first iteration in which it is used; before it the gradient travels as it is.
        codec: of P and Q, in both directions; None: float32.
    """

    rank: int
    start: int = 0
    codec: Codec | None = None

    def __str__(self) -> str:
        name = f"{POWERSGD}:{self.rank}" + (f":{self.codec}" if self.codec else "")
        return name + (f":start={self.start}" if self.start else "")

    def bytes(self, tensor: Tensor) -> int:
        """Return the bytes that are sent of a tensor in one direction, once it has started."""
        sizes = [self.rank * side for side in matrix_shape(tensor)]
        if self.codec is None:
            return ELEMENT_BYTES * sum(sizes)
        return sum(self.codec.size(size) for size in sizes)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether it makes a tensor enough smaller."""
        return (
            tensor.dim() > 1 and LEAST_RATE * self.bytes(tensor) <= ELEMENT_BYTES * tensor.numel()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorTables:
    """The tables of tensors that travel by PowerSGD together, with means as values.

    Attributes:
        how: they travel.
        held: P of all, Q of all, and where they start later G of each, the gradient.
    """

    indices: Sequence[int]
    how: LowRank
    held: Sequence[Trained]


def factor_tables(tensors: Sequence[Trained], chosen: Mapping[int, LowRank]) -> list[FactorTables]:
    """Return the tables of the tensors that travel so.

    Neighbours share tables of up to `SHARED_ELEMENTS`: a table costs a worker and a shard the same
    work for ten numbers as for ten thousand. With a codec each tensor has its own, so that no block
    of the codec has elements of two.

    Args:
        chosen: those that travel so, by index.
    """
    groups: list[list[int]] = []
    elements = 0
    for index, how in chosen.items():
        own = how.rank * max(matrix_shape(tensors[index].tensor))
        device = tensors[index].tensor.device
        last = groups[-1][-1] if groups else None
        joins = (
            last is not None
            and how.codec is None
            and (chosen[last], tensors[last].tensor.device) == (how, device)
            and elements + own <= SHARED_ELEMENTS
        )
        if joins:
            groups[-1].append(index)
            elements += own
        else:
            groups.append([index])
            elements = own
    return [_tables_of(tensors, group, chosen[group[0]]) for group in groups]


def _tables_of(tensors: Sequence[Trained], group: Sequence[int], how: LowRank) -> FactorTables:
    members = [tensors[index] for index in group]
    shapes = [matrix_shape(member.tensor) for member in members]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    parts = {
        f"{members[0].name}{more}, P": torch.zeros(sum(how.rank * n for n, _ in shapes)),
        f"{members[0].name}{more}, Q": torch.cat(
            [_first_q(t.name, m, how.rank) for t, (_, m) in zip(members, shapes, strict=True)]
        ),
    }
    if how.start:
        exact = zip(members, shapes, strict=True)
        parts |= {f"{member.name}, G": torch.zeros(n * m) for member, (n, m) in exact}
    device, rule = members[0].tensor.device, Rule(kind=RuleKind.MEAN)
    held = [Trained(name=name, tensor=part.to(device), rule=rule) for name, part in parts.items()]
    return FactorTables(indices=tuple(group), how=how, held=held)


def _first_q(name: str, m: int, rank: int) -> Tensor:
    """Return random numbers that depend on the tensor alone: hosts may divide tensors otherwise."""
    numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    q = torch.randn(m, rank, generator=numbers, dtype=torch.float32, device="cpu")
    return q.t().reshape(-1)


def matrices_of(
    tables: FactorTables,
    members: Mapping[int, RuledTensor],
    own: range,
    mean_p: Tensor,
) -> dict[int, LowRankMatrix]:
    """Return the tensors of shared tables, over the memory of these, by index.

    Args:
        own: the virtual workers of this worker.
        mean_p: P of all on the host, flat, where its mean arrives.
    """
    trained = {index: member.trained for index, member in members.items()}
    p, q = (
        factors_in(flat, trained, side, tables.how.rank)
        for side, flat in enumerate((mean_p, tables.held[1].tensor))
    )
    exact = dict(zip(members, (held.tensor for held in tables.held[2:]), strict=False))
    return {
        index: LowRankMatrix(member, p[index], q[index], exact=exact.get(index), own=own)
        for index, member in members.items()
    }


def factors_in(
    flat: Tensor, members: Mapping[int, Trained], side: int, rank: int
) -> dict[int, Tensor]:
    """Return each tensor's part of P of all (side 0) or of Q of all (side 1), with `rank` rows."""
    sides = [matrix_shape(member.tensor)[side] for member in members.values()]
    parts = flat.split([rank * length for length in sides])
    return {index: part.view(rank, -1) for index, part in zip(members, parts, strict=True)}


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return n and m of a tensor as a matrix: its first axis, and all others together."""
    return tensor.shape[0], tensor[0].numel()


class DueUpdate(NamedTuple):
    """An update that waits for a mean: of an iteration, of Q, or of G where it is exact."""

    step: Step
    is_exact: bool


class LowRankMatrix:
    """One tensor that travels as P and Q.

    Args:
        p: its mean P, r x n, on the host.
        q: its mean Q, r x m.
        exact: if it starts later its mean gradient G.
        own: the virtual workers of this worker.

    Attributes:
        due: the update that is to be applied next, if any.
    """

    def __init__(
        self,
        ruled: RuledTensor,
        p: Tensor,
        q: Tensor,
        *,
        exact: Tensor | None,
        own: range,
    ) -> None:
        self.trained, self.history = ruled.trained, ruled.history
        self.value = ruled.flat.view(matrix_shape(self.trained.tensor))
        self.held_back = {worker: torch.zeros_like(self.value) for worker in own}
        """What was not sent of each virtual worker's gradients; while an iteration is under way
        M.
        """
        self.due: DueUpdate | None = None
        self._p, self._q = p, q
        self._exact = None if exact is None else exact.view(self.value.shape)
        self.first_q = self._q.clone()
        """The random Q from which empty columns start again."""
        self._basis_there = device_of(q.device).host_memory(*p.t().shape).zero_()
        self._basis = self._basis_there.to(q.device)
        self._copied: Event = DONE

    def reset(self) -> None:
        """Begin with nothing held back."""
        self.due = None
        for held_back in self.held_back.values():
            held_back.zero_()
        self._q.copy_(self.first_q)

    def kept(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that a snapshot holds, by name."""
        name = self.trained.name
        lost = [(f"{name}, lost of {v}", part) for v, part in self.held_back.items()]
        return [*lost, (f"{name}, Q", self._q)]

    def take(self, worker: int, gradient: Tensor, scale: float, out: Tensor) -> None:
        """Write P of a virtual worker, r x n, to `out`."""
        held_back = self.held_back[worker]
        held_back.add_(gradient.reshape(self.value.shape), alpha=scale)
        torch.mm(self._q, held_back.t(), out=out)

    def take_basis(self) -> None:
        """Take the mean of P, which has come."""
        found = torch.from_numpy(orthonormal(self._p.numpy()))
        self._copied.synchronize()  # P of this iteration was made after that: it has ended
        self._basis_there.copy_(found)
        self._basis.copy_(self._basis_there, non_blocking=True)
        self._copied = device_of(self._q.device).event()

    def second(self, worker: int, scale: float, out: Tensor) -> None:
        """Write Q of a virtual worker, r x m, to `out`.

        The shards multiply its mean by `scale`.
        """
        torch.mm(self._basis.t(), self.held_back[worker], out=out)
        if scale != 1.0:
            out.div_(scale)

    def apply(self) -> None:
        """Apply the rule to the mean gradient, once the mean of Q or G has come."""
        assert self.due is not None
        due, self.due = self.due, None
        if self.trained.rule.kind is RuleKind.MEAN:
            self._mean(slice(None), self.value, due)
        else:
            self._update_in_tiles(due)
        empty = (self._q == 0).all(dim=1, keepdim=True)
        self._q.copy_(torch.where(empty, self.first_q, self._q))

    def _update_in_tiles(self, due: DueUpdate) -> None:
        n, m = self.value.shape
        rule, (iteration, rates) = self.trained.rule, due.step
        rate = rates[self.trained.rate_index]
        step = n if rule.matrix is not None else max(1, TILE_ELEMENTS // m)
        histories = [history.view(n, m) for history in self.history]
        tile = torch.empty(min(step, n), m, dtype=self.value.dtype, device=self.value.device)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            mean = tile[: min(step, n - start)]
            self._mean(rows, mean, due)
            history = [part[rows].reshape(-1) for part in histories]
            value = self.value[rows].reshape(-1)
            update(rule, mean.view(-1), history, value, rate=rate, step=iteration)

    def _mean(self, rows: slice, out: Tensor, due: DueUpdate) -> None:
        """Write rows of the mean gradient to `out`, and take them from what is held back."""
        if due.is_exact and self._exact is not None:
            out.copy_(self._exact[rows])
        else:
            first, *others = self.held_back.values()
            subtracted_product(self._basis[rows], self._q, first[rows], out)
            for held_back in others:
                held_back[rows].sub_(out)


def subtracted_product(basis: Tensor, q: Tensor, left: Tensor, out: Tensor) -> None:
    """Write the product of `basis`, n x r, and `q`, r x m, to `out`, and subtract it from `left`.

    All processors compute the same bits: no operations are fused.
    """
    compiled = native.LIBRARY
    if compiled is not None and out.device.type == "cpu":
        compiled.product(basis.numpy(), q.numpy(), left.numpy(), out.numpy())
        return
    torch.mul(basis[:, :1], q[0], out=out)
    for column in range(1, len(q)):
        out.add_(basis[:, column : column + 1] * q[column])
    left.sub_(out)


def orthonormal(p: Array) -> Array:
    """Return n x r orthonormal columns that span the rows of an r x n matrix (Gram-Schmidt); zeros
    for columns that depend on others.

    All processors compute the same bits: sums are of float64, in a fixed order.
    """
    compiled = native.LIBRARY
    if compiled is not None:
        p = np.ascontiguousarray(p)
        found = np.empty(p.shape[::-1], np.float32)
        compiled.orthonormal(p, found, DEPENDENT)
        return found
    columns = p.astype(np.float64)
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
        numbers = np.concatenate(
            [numbers[:half] + numbers[size - half :], numbers[half : size - half]]
        )
    return float(numbers[0])
