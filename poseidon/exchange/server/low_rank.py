"""PowerSGD: a matrix travels as two thin ones whose product is near it (Vogels
et al., NeurIPS 2019, algorithms 1 and 2).

For a tensor as an n x m matrix, its mean over the workers in two rounds through the shards:

    M = gradient + what was held back          on each worker
    P = M Q              n x r                 pushed; the shards average
    P = orthonormal columns of the mean P      on each worker, with the same bits
    Q = M^T P            m x r                 pushed; the shards average
    mean gradient = P Q^T; held back = M - P Q^T; Q is where the next iteration starts

The second round belongs to the same iteration: the mean of P is read before the clock moves. The P
of all tensors are under way together. P and Q are tables of their own (`RuleKind.MEAN`). The
tensor's own table is a copy, which brings the first value to all workers; its rule runs on each
worker.

Before the iteration `start` the mean gradient itself is a third table of means. In each iteration
all workers skip the tables that they do not use (`ps_server.Client.skip`). A shard answers when all
have skipped. A worker waits for that before it uses the table again: the workers' messages to
different shards have no common order.

P and Q may have a codec of their own. What it loses is a part of M - P Q^T, so it is held back with
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import Array, ExchangeSettings, History, Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.lossy.low_rank_matrix import LowRankMatrix
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.replicas import check_rules, checksum, introduce
from poseidon.exchange.server.placed import Placed, Push
from poseidon.exchange.server.tables import ServerTables
from ps_server.rules import sum_of_squares


class LowRankTensor(Placed):
    """A tensor that travels by PowerSGD.

    Args:
        index: of the tensor.
        table: its copy.
        trained: the tensor.
        matrix: its factors; their place is their first table.
        settings: common to all tensors; without a limit of the norm.
        tables: of the store.
    """

    def __init__(
        self,
        index: int,
        table: int,
        trained: Trained,
        matrix: LowRankMatrix,
        settings: ExchangeSettings,
        tables: ServerTables,
    ) -> None:
        self.indices = (index,)
        self.table = table
        self.trained = trained
        self.matrix = matrix
        self._scale = settings.gradient_scale
        self._tables = tables
        self._step = Step(settings.start_clock, 0.0)
        self._held_back: Mapping[str, Array] = {}

    def open(self, histories: Sequence[History] | None) -> History:
        """Continue from this history, and from what `hold_back` was given since the last call;
        else from zeros.
        """
        self.matrix.reset(histories[self.indices[0]] if histories else ())
        for name, tensor in self.matrix.kept():
            if name in self._held_back:
                tensor.copy_(torch.from_numpy(self._held_back[name]).view(tensor.shape))
        self._held_back = {}
        return ()

    def start(self, step: Step) -> None:
        self._step = step

    def take(self, index: int, gradient: Tensor) -> Push | None:
        matrix = self.matrix
        self.wait(index)
        for place in matrix.unused:
            self._tables.read(place)
        if self._step.iteration < matrix.start:
            return matrix.place + 2, matrix.take_exact(gradient.detach())
        return matrix.place, matrix.take(gradient.detach(), self._scale)

    def wait(self, index: int) -> None:
        if self.matrix.is_due:
            self._tables.read(self.matrix.place + (2 if self.matrix.is_exact else 1))
            self.matrix.apply()

    def complete(self) -> Push | None:
        if self.matrix.begun:
            return None
        return self.take(self.indices[0], torch.zeros_like(self.matrix.value))

    def finish(self) -> None:
        """Push Q, once the mean of P has come, and skip the tables that this iteration does not
        use.
        """
        matrix = self.matrix
        matrix.end(self._step.rate, self._step.iteration)
        if not matrix.is_exact:
            self._tables.read(matrix.place, staleness=-1)
            self._tables.push(matrix.place + 1, matrix.second(self._scale))
        for place in matrix.unused:
            self._tables.skip(place)

    def take_values(self) -> None:
        if self.matrix.is_due:
            self.matrix.apply()

    def traffic(self, tables: Sequence[Traffic]) -> Mapping[int, Traffic]:
        """Return the bytes of P, Q and G together."""
        matrix = self.matrix
        parts = tables[matrix.place : matrix.place + (3 if matrix.start else 2)]
        whole = Traffic(
            bytes_out=sum(part.bytes_out for part in parts),
            bytes_in=sum(part.bytes_in for part in parts),
            on_way_s=sum(part.on_way_s for part in parts),
            held_back=math.sqrt(sum_of_squares(matrix.held_back)),
        )
        return {self.indices[0]: whole}

    def histories(self) -> Mapping[int, History]:
        shape = self.matrix.shape
        history = [part.cpu().numpy().reshape(shape).copy() for part in self.matrix.history]
        return {self.indices[0]: history}

    def replicated(self) -> Mapping[str, Tensor]:
        name = self.matrix.name
        return {f"{name}, history {number}": h for number, h in enumerate(self.matrix.history)}

    def held_back(self) -> Mapping[str, Array]:
        return {
            name: tensor.reshape(-1).cpu().numpy().copy() for name, tensor in self.matrix.kept()
        }

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        for name, tensor in self.matrix.kept():
            if name in held_back and held_back[name].size != tensor.numel():
                raise SnapshotError(
                    f"the snapshot has {held_back[name].size} elements of {name}; expected "
                    f"{tensor.numel()}: "
                    "the rank of --compress=powersgd:RANK is another, or the module"
                )
        self._held_back = held_back


def compare_rules(own: Sequence[LowRankTensor], control: JobControl, *, required: bool) -> None:
    """Compare the results of the rules over all workers, and the first Q: processors may draw
    different numbers.

    Args:
        own: the tensors whose rules the workers apply.
        control: of the exchange.
        required: whether all workers must compute the same bits; if not, a difference is a warning.
    """
    first_q = "-".join(checksum(placed.matrix.first_q) for placed in own)
    _, samples = introduce(control, [placed.trained for placed in own], {}, more=f" {first_q}")
    check_rules(samples, required=required)
