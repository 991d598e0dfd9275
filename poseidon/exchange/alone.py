"""The carrier of a single process: it applies the update rule, and waits for no other worker.

With several virtual workers it computes what their job computes on any number of processes, to the
bit: the average that the shards compute, and the product of all factors.

`AloneRowTables` are the row tables of such a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.carrier import FactoredCarrier, GradientCarrier, LocalHistories, Step
from poseidon.exchange.device import HOST, device_of
from poseidon.exchange.factors.products import Scratch, apply_factors, factors_sum_of_squares
from poseidon.exchange.replicas import arithmetic_sample, common_kernel
from poseidon.exchange.turns import Factors
from ps_server import Rule
from ps_server.client_rows import PIECE_ROWS, ClientRows
from ps_server.protocol import messages as m
from ps_server.protocol.messages import Array, RowIds
from ps_server.protocol.row_cell import RowCell
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.row_rules import NO_ROWS
from ps_server.rules import norm_limit, squares_of, update, update_together


class AloneCarrier(GradientCarrier, FactoredCarrier):
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
        self._tensors = tensors
        self._settings = settings
        self._in_parts = in_parts
        self._workers = virtual_workers
        self._flat = [trained.tensor.detach().view(-1) for trained in tensors]
        self._begun: dict[int, Tensor] = {}
        self._factors: dict[int, Factors] = {}
        self._averages: dict[int, Tensor] | None = None
        self._step = Step(settings.start_clock, (0.0,))
        self.state = LocalHistories(dict(enumerate(tensors)), replicated=False)
        if by_factors:
            kernel = common_kernel([arithmetic_sample(tensors)], required=True)
            self._scratch = Scratch(self._flat[0].device, kernel)

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        self.state.load(histories)

    def start(self, step: Step) -> None:
        self._step = step
        self._begun.clear()

    def begin(self, index: int, gradient: Tensor) -> None:
        self._begun[index] = gradient.detach().reshape(-1)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self._factors[index] = (u_KN.detach().clone(), v_KM.detach().clone())

    def release(self, index: int) -> None:
        pass

    def wait(self, index: int) -> None:
        pass

    def held_squares(self) -> list[float]:
        if self._limits_on_device:
            return []
        of_factors = [
            factors_sum_of_squares(*factors) / self._workers**2
            for _, factors in sorted(self._all_factors().items())
        ]
        return [*chain(*map(squares_of, self._all_averages().values())), *of_factors]

    def finish(self, limit: float) -> None:
        factors, gradients = self._all_factors(), self._all_averages()
        scale = self._settings.gradient_scale * limit
        rates, iteration = self._step.rates, self._step.iteration
        if gradients and not self._device.is_host:
            self._update_together(gradients, scale)
            gradients = {}
        for index, trained in enumerate(self._tensors):
            rate, history = rates[trained.rate_index], self.state.of[index]
            if index in factors:
                self._apply_factors(index, scale / self._workers, rate)
            elif index in gradients:
                gradient = gradients[index]
                if scale != 1.0:
                    gradient.mul_(scale)
                update(
                    trained.rule, gradient, history, self._flat[index], rate=rate, step=iteration
                )
        self._begun.clear()
        self._factors.clear()
        self._averages = None

    def _update_together(self, gradients: Mapping[int, Tensor], scale: float) -> None:
        """Apply the rules of tensors on a device, with the launches of one tensor for all of a rule
        and rate.
        """
        together = list(gradients.values())
        clip = self._settings.clip
        if clip is not None and self._limits_on_device:
            torch._foreach_mul_(together, (norm_limit(together, clip) * scale).float())
        elif scale != 1.0:
            torch._foreach_mul_(together, scale)
        groups: dict[tuple[Rule, int], list[int]] = {}
        for index in gradients:
            trained = self._tensors[index]
            groups.setdefault((trained.rule, trained.rate_index), []).append(index)
        for (rule, rate_index), indices in groups.items():
            own = [gradients[index] for index in indices]
            histories = [self.state.of[index] for index in indices]
            values = [self._flat[index] for index in indices]
            step, rate = self._step.iteration, self._step.rates[rate_index]
            if rule.matrix is None:
                update_together(rule, own, histories, values, rate=rate, step=step)
                continue
            for gradient, history, value in zip(own, histories, values, strict=True):
                update(rule, gradient, history, value, rate=rate, step=step)

    def _all_factors(self) -> dict[int, Factors]:
        for index in self.by_factors - self._factors.keys():
            rows = [self._flat[0].new_empty(0, n) for n in self._tensors[index].tensor.shape]
            self._factors[index] = (rows[0], rows[1])
        return self._factors

    def _all_averages(self) -> dict[int, Tensor]:
        """Set statistics that have begun to their averages, once. Return the average gradients."""
        if self._averages is not None:
            return self._averages
        found: dict[int, Tensor] = {}
        self._averages = found
        for index, trained in enumerate(self._tensors):
            begun = self._begun.get(index)
            if begun is not None and self._workers > 1:
                begun.div_(self._workers)
            if trained.statistics and begun is not None:
                self._flat[index].copy_(begun)
            elif not trained.statistics and index not in self.by_factors:
                if begun is not None:
                    found[index] = begun
                elif not self._in_parts:
                    found[index] = torch.zeros_like(self._flat[index])
        return found

    def _apply_factors(self, index: int, scale: float, rate: float) -> None:
        trained = self._tensors[index]
        value = trained.tensor.detach()
        apply_factors(
            trained.rule,
            *self._factors[index],
            value,
            [history.view(value.shape) for history in self.state.of[index]],
            rate=rate,
            step=self._step.iteration,
            scale=scale,
            scratch=self._scratch,
        )

    def settle(self, clock: int) -> None:
        pass

    def close(self) -> None:
        pass


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
