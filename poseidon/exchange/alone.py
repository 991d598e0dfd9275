"""The carrier of a single process: it applies the update rule, and waits for no other worker.

With several virtual workers it computes what their job computes on any number of processes, to the
bit: the average that the shards compute, and the product of all factors.

`AloneRowTables` are the row tables of such a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.carrier import Carrier, Step
from poseidon.exchange.device import HOST, device_of
from poseidon.exchange.factors.products import Scratch, apply_factors, factors_sum_of_squares
from poseidon.exchange.replicas import arithmetic_sample, common_kernel
from poseidon.exchange.ruled import LocalHistories, RuledTensor
from poseidon.exchange.turns import Factors
from ps_server import Rule
from ps_server.client_rows import PIECE_ROWS, ClientRows
from ps_server.protocol import messages as m
from ps_server.protocol.messages import Array, RowIds
from ps_server.protocol.row_cell import RowCell
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.row_rules import NO_ROWS
from ps_server.rules import norm_limit, squares_of, update_together


class AloneCarrier(Carrier):
    """Applies the gradients of an iteration together in `finish`.

    Args:
        in_parts: whether a tensor that has not begun takes no part in an iteration; otherwise its
            gradient is zero.
        virtual_workers: V, by which the sums of gradients are divided.
        by_factors: indices of the tensors whose factors it takes.
        is_only: whether the norm that is limited is of these gradients alone.
    """

    state: LocalHistories

    def __init__(
        self,
        tensors: Sequence[Trained],
        settings: ExchangeSettings,
        *,
        in_parts: bool = False,
        virtual_workers: int = 1,
        by_factors: AbstractSet[int] = frozenset(),
        is_only: bool = False,
    ) -> None:
        self.indices = range(len(tensors))
        self.by_factors = by_factors
        self._device = device_of(tensors[0].tensor.device) if tensors else HOST
        self._limits_on_device = is_only and not (self._device.is_host or by_factors)
        """Whether the limit on the norm is taken where the gradients are: a training loop does not
        wait for it.
        """
        self._settings = settings
        self._in_parts = in_parts
        self._workers = virtual_workers
        self._gradients: dict[int, Tensor] = {}
        """The averages that have begun."""
        self._factors: dict[int, Factors] = {}
        self._step = Step(settings.start_clock, (0.0,))
        self.state = LocalHistories(dict(enumerate(tensors)), replicated=False)
        if by_factors:
            kernel = common_kernel([arithmetic_sample(tensors)], required=True)
            self._scratch = Scratch(tensors[0].tensor.device, kernel)

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        self.state.load(histories)

    def start(self, step: Step) -> None:
        self._step = step
        self._gradients.clear()

    def begin(self, index: int, gradient: Tensor) -> None:
        average, own = gradient.detach().reshape(-1), self.state.of[index]
        if self._workers > 1:
            average.div_(self._workers)
        if own.trained.statistics:
            own.flat.copy_(average)
        else:
            self._gradients[index] = average

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self._factors[index] = (u_KN.detach().clone(), v_KM.detach().clone())

    def held_squares(self) -> list[float]:
        if self._limits_on_device:
            return []
        factors = self._factors.values()
        of_factors = [factors_sum_of_squares(*own) / self._workers**2 for own in factors]
        return [*chain(*map(squares_of, self._gradients.values())), *of_factors]

    def finish(self, limit: float) -> None:
        scale = self._settings.gradient_scale * limit
        for index, own in self.state.of.items():
            if index in self.by_factors:
                self._apply_factors(own, self._factors.get(index), scale / self._workers)
            elif not (index in self._gradients or own.trained.statistics or self._in_parts):
                self._gradients[index] = torch.zeros_like(own.flat)
        if self._gradients and not self._device.is_host:
            self._update_together(scale)
        else:
            for index, gradient in self._gradients.items():
                self.state.of[index].apply(gradient, self._step, scale)
        self._gradients.clear()
        self._factors.clear()

    def _update_together(self, scale: float) -> None:
        """Apply the rules of tensors on a device, with the launches of one tensor for all of a rule
        and rate.
        """
        gradients = dict(sorted(self._gradients.items()))
        together, clip = list(gradients.values()), self._settings.clip
        if clip is not None and self._limits_on_device:
            torch._foreach_mul_(together, (norm_limit(together, clip) * scale).float())
        elif scale != 1.0:
            torch._foreach_mul_(together, scale)
        groups: dict[tuple[Rule, int], list[tuple[RuledTensor, Tensor]]] = {}
        for index, gradient in gradients.items():
            own = self.state.of[index]
            groups.setdefault((own.trained.rule, own.trained.rate_index), []).append(
                (own, gradient)
            )
        for (rule, rate_index), pairs in groups.items():
            if rule.matrix is not None:
                for own, gradient in pairs:
                    own.apply(gradient, self._step, 1.0)
                continue
            update_together(
                rule,
                [gradient for _, gradient in pairs],
                [own.history for own, _ in pairs],
                [own.flat for own, _ in pairs],
                rate=self._step.rates[rate_index],
                step=self._step.iteration,
            )

    def _apply_factors(self, own: RuledTensor, factors: Factors | None, scale: float) -> None:
        trained, value = own.trained, own.trained.tensor.detach()
        u_BN, v_BM = factors or tuple(own.flat.new_empty(0, side) for side in value.shape)
        apply_factors(
            trained.rule,
            u_BN,
            v_BM,
            value,
            [history.view(value.shape) for history in own.history],
            rate=self._step.rates[trained.rate_index],
            step=self._step.iteration,
            scale=scale,
            scratch=self._scratch,
        )


Pieces = Iterable[tuple[RowIds, Sequence[Array]]]


class AloneRowTables:
    """The row tables of a process that trains alone; `ClientRows` says what each method does."""

    def __init__(self) -> None:
        self._cells: list[RowCell] = []
        self._requests: dict[int, tuple[int, RowIds]] = {}
        self._number = 0

    def create(self, spec: RowTableSpec) -> int:
        self._cells.append(RowCell(m.CreateRows(len(self._cells), 1, spec), shard=0, workers=1))
        return len(self._cells) - 1

    def clock(self, table: int) -> int:
        return self._cells[table].clock

    def request(
        self, table: int, rows_N: RowIds, *, ahead: int = 0, staleness: int | None = None
    ) -> int:
        self._number += 1
        self._requests[self._number] = table, rows_N
        return self._number

    def read(self, number: int) -> Array:
        table, rows_N = self._requests.pop(number)
        return self._cells[table].memory.values(rows_N)

    def forget(self, number: int) -> None:
        del self._requests[number]

    def push(self, table: int, rows_N: RowIds, gradient_Nd: Array, *, rate: float) -> None:
        cell = self._cells[table]
        cell.push(0, m.PushRows(table, cell.clock, rate, rows_N, gradient_Nd.reshape(-1)))

    def stored(self, table: int) -> Iterator[tuple[RowIds, list[Array]]]:
        memory = self._cells[table].memory
        first = 0
        while first < memory.count:
            rows_N, arrays = memory.stored(first, PIECE_ROWS)
            yield rows_N, arrays
            first += len(rows_N)

    def restore(self, table: int, clock: int, pieces: Pieces | None) -> None:
        cell = self._cells[table]
        empty = [np.zeros((0, width), np.float32) for width in cell.spec.widths]
        for rows_N, arrays in chain(pieces or (), [(NO_ROWS, empty)]):
            flat = [array.reshape(-1) for array in arrays]
            cell.restore(0, m.KeptRows(table, clock, rows_N, flat))


RowTables = ClientRows | AloneRowTables
