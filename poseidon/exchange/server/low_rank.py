"""PowerSGD: a matrix travels as two thin ones whose product is near it (Vogels
et al., NeurIPS 2019, algorithms 1 and 2).

For a tensor as an n x m matrix, its mean over the workers in two rounds through the shards:

    M = gradient + what was held back          on each worker
    P = M Q              n x r                 pushed; the shards average
    P = orthonormal columns of the mean P      on each worker, with the same bits
    Q = M^T P            m x r                 pushed; the shards average
    mean gradient = P Q^T; held back = M - P Q^T; Q is where the next iteration starts

With several virtual workers, M, P and Q are of each: the shards average over all of them.

The second round belongs to the same iteration: the mean of P is read before the clock moves. The P
of all tensors are under way together. P and Q are tables of their own (`RuleKind.MEAN`), which
neighbours share: P leaves when the gradients of all have come. A tensor's own table is a copy,
which brings the first value to all workers; its rule runs on each worker.

Before the iteration `start` the mean gradient of each is another table of means. In each iteration
all workers skip the tables that they do not use (`ps_server.Client.skip`). A shard answers when all
have skipped. A worker waits for that before it uses the table again: the workers' messages to
different shards have no common order.

P and Q may have a codec of their own. What it loses is a part of M - P Q^T, so it is held back with
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import Array, ExchangeSettings, History, Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.lossy.low_rank_matrix import (
    DueUpdate,
    FactorTables,
    factors_in,
    matrices_of,
)
from poseidon.exchange.observer import Traffic
from poseidon.exchange.replicas import check_rules, checksum, introduce
from poseidon.exchange.ruled import LocalHistories
from poseidon.exchange.server.placed import Placed, Push
from poseidon.exchange.server.tables import ServerTables
from ps_server.protocol.virtual_workers import Node, TreeSum
from ps_server.rules import sum_of_squares


class _Factors(NamedTuple):
    """P or Q of one virtual worker: the memory of all tensors, and each tensor's part of it."""

    flat: Tensor
    of: Mapping[int, Tensor]


class LowRankTensors(LocalHistories, Placed):
    """Tensors that travel by PowerSGD, and share tables of P and Q. All workers keep their
    histories.

    Args:
        place: of the first of these in the store.
        table: the copy of the first tensor.
        settings: common to all tensors; without a limit of the norm.
    """

    def __init__(
        self,
        shared: FactorTables,
        place: int,
        table: int,
        tensors: Sequence[Trained],
        settings: ExchangeSettings,
        tables: ServerTables,
    ) -> None:
        trained = {index: tensors[index] for index in shared.indices}
        super().__init__(trained, replicated=True)
        self.indices = shared.indices
        self.table = table
        own = tables.own
        self.matrices = matrices_of(shared, self.of, own, tables.host_value(place))
        self._p, self._q = place, place + 1
        self._exact = {
            index: place + 2 + number
            for number, index in enumerate(shared.indices if shared.how.start else ())
        }
        self._start = shared.how.start
        self._factors = [
            {
                worker: _Factors(flat, factors_in(flat, trained, side, shared.how.rank))
                for worker, flat in ((worker, torch.empty_like(held.tensor)) for worker in own)
            }
            for side, held in enumerate(shared.held[:2])
        ]
        self._scale = settings.gradient_scale
        self._tables = tables
        self._skipped: Sequence[int] = ()
        """The tables that the iteration which has ended last did not use."""
        self._read: set[int] = set()
        """The tables of means that were read since the last iteration has ended."""
        self.start(Step(settings.start_clock, (0.0,)))

    def open(self, histories: Sequence[History] | None, given: Mapping[str, Array]) -> History:
        self._skipped = ()
        self.load(histories)
        for matrix in self.matrices.values():
            matrix.reset()
        for name, tensor in self.parts().items():
            if name in given:
                tensor.copy_(torch.from_numpy(given[name]).view(tensor.shape))
        return ()

    def start(self, step: Step) -> None:
        self._step = step
        self._turns = dict.fromkeys(self.indices, self._tables.own.start)
        """The virtual worker whose gradient comes next, by index."""
        self._sums: dict[int, TreeSum[Tensor]] = {}
        """The sums of the pushes of this iteration, by table."""

    @property
    def _is_exact(self) -> bool:
        """Whether this iteration's gradients travel as they are."""
        return self._step.iteration < self._start

    def take(self, index: int, gradient: Tensor) -> Push | None:
        matrix = self.matrices[index]
        self.wait(index)
        for table in self._skipped:
            self._tables.read(table)
        self._skipped = ()
        worker = self._turns[index]
        self._turns[index] += 1
        if self._is_exact:
            return self._sum(
                self._exact[index], worker, gradient.detach().reshape(matrix.value.shape)
            )
        own = self._factors[0][worker]
        matrix.take(worker, gradient.detach(), self._scale, own.of[index])
        is_last = min(self._turns.values()) > worker
        return self._sum(self._p, worker, own.flat) if is_last else None

    def _sum(self, table: int, worker: int, part: Tensor) -> Push | None:
        """Add what a virtual worker pushes to a table. Return the sum of a node once it is
        complete.
        """
        tree = self._sums.setdefault(table, TreeSum(self._tables.store.placed.count))
        total = tree.release(Node(worker, worker + 1), part, self._tables.nodes(table))
        return None if total is None else (table, total)

    def wait(self, index: int) -> None:
        matrix = self.matrices[index]
        if matrix.due is not None:
            table = self._exact[index] if matrix.due.is_exact else self._q
            if table not in self._read:  # tensors share Q
                self._tables.read(table)
                self._read.add(table)
            matrix.apply()

    def complete(self) -> Sequence[Push]:
        pushes = [
            self.take(index, torch.zeros_like(matrix.value))
            for index, matrix in self.matrices.items()
            for _ in range(self._turns[index], self._tables.own.stop)
        ]
        return [push for push in pushes if push is not None]

    def finish(self) -> None:
        """Push Q, once the mean of P has come, and skip the tables that this iteration does not
        use.
        """
        exact = self._is_exact
        self._read.clear()
        for matrix in self.matrices.values():
            matrix.due = DueUpdate(self._step, exact)
        if not exact:
            self._tables.read(self._p, staleness=-1)
            for matrix in self.matrices.values():
                matrix.take_basis()
            for worker, own in self._factors[1].items():
                for index, matrix in self.matrices.items():
                    matrix.second(worker, self._scale, own.of[index])
                push = self._sum(self._q, worker, own.flat)
                if push is not None:
                    self._tables.push(*push)
        self._skipped = (self._p, self._q) if exact else tuple(self._exact.values())
        for table in self._skipped:
            self._tables.skip(table)

    def take_values(self) -> None:
        for matrix in self.matrices.values():
            if matrix.due is not None:
                matrix.apply()

    def traffic(self, tables: Sequence[Traffic]) -> Mapping[int, Traffic]:
        """Divide the bytes of P and Q among the tensors by their sizes; G is of one tensor."""
        found = {}
        p, q = (next(iter(of.values())) for of in self._factors)
        for index, matrix in self.matrices.items():
            first, *others = matrix.held_back.values()
            parts = [(tables[self._exact[index]], 1.0)] if index in self._exact else []
            parts += [
                (tables[self._p], p.of[index].numel() / p.flat.numel()),
                (tables[self._q], q.of[index].numel() / q.flat.numel()),
            ]
            found[index] = Traffic(
                bytes_out=round(sum(part.bytes_out * share for part, share in parts)),
                bytes_in=round(sum(part.bytes_in * share for part, share in parts)),
                on_way_s=sum(part.on_way_s for part, _ in parts),
                held_back=math.sqrt(sum_of_squares(sum(others, first).view(-1))),
            )
        return found

    def parts(self) -> Mapping[str, Tensor]:
        return dict(pair for matrix in self.matrices.values() for pair in matrix.kept())

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        for name, tensor in self.parts().items():
            if name in held_back and held_back[name].size != tensor.numel():
                raise SnapshotError(
                    f"the snapshot has {held_back[name].size} elements of {name}; expected "
                    f"{tensor.numel()}: the rank of --compress=powersgd:RANK or the module has "
                    "changed"
                )


def compare_rules(own: Sequence[LowRankTensors], control: JobControl, *, required: bool) -> None:
    """Compare the results of the rules over all workers, and the first Q: processors may draw
    different numbers.

    Args:
        own: the tensors whose rules the workers apply.
        required: whether all workers must compute the same bits; if not, a difference is a warning.
    """
    matrices = [matrix for placed in own for matrix in placed.matrices.values()]
    first_q = "-".join(checksum(matrix.first_q) for matrix in matrices)
    trained = [matrix.trained for matrix in matrices]
    _, samples = introduce(control, trained, {}, more=f" {first_q}")
    check_rules(samples, required=required)
