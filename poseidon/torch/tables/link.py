"""One row table of a group, on one worker: a `Table`, or the weight of a sparse embedding.

The weight of an nn.Embedding(sparse=True) or EmbeddingBag(sparse=True) stays whole on each worker.
Before its module runs, the rows that it looks up are brought up to date; `settle`, and whatever else
reads the weight, updates all rows.

Law: every worker pushes each table once an iteration, maybe no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils.hooks import RemovableHandle

from poseidon.errors import UsageError
from poseidon.exchange.alone import Pieces, RowTables
from poseidon.exchange.module_hooks import OfOneModule
from poseidon.torch.reads import Reads
from poseidon.torch.tables.plan import PlannedTable
from poseidon.torch.tables.table import Table, distinct
from ps_server.client_rows import PIECE_ROWS
from ps_server.protocol.messages import Array, RowIds
from ps_server.row_rules import NO_ROWS, sum_by_row


class Callbacks(NamedTuple):
    """What the group does for its tables.

    Attributes:
        on_forward: called before rows are looked up.
        on_gradient: called when a backward pass has reached a table.
        passes_left: returns the backward passes of this step that have not ended.
        around_wait: entered around each wait for rows.
    """

    on_forward: Callable[[], None]
    on_gradient: Callable[[Tensor], None]
    passes_left: Callable[[], int]
    around_wait: Callable[[], AbstractContextManager[None]]


class TableLink:
    """One row table of a group, on this worker: the `Lookup` of its `Table`."""

    def __init__(self, planned: PlannedTable, tables: RowTables, callbacks: Callbacks) -> None:
        self.planned = planned
        self.spec = planned.spec
        self._padding_idx: int | None = None
        """The index that names no row; None: each does."""
        self._tables = tables
        self._callbacks = callbacks
        self.number = tables.create(planned.spec)
        self._read = False
        """Whether rows were read in this iteration, so that it may be pushed."""
        self._last_pass_read = False
        self._prefetched: dict[bytes, tuple[int, int]] = {}
        """Of rows the clock and number of the request that was made ahead."""

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy of a table is in no group."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def pull(self, rows_U: RowIds) -> Array:
        """Return the values of rows in this iteration, U x dim."""
        wanted = torch.is_grad_enabled()
        clock, number = self._prefetched.pop(rows_U.tobytes(), (-1, -1))
        if clock != self._tables.clock(self.number):
            if clock >= 0:
                self._tables.forget(number)
            number = self._tables.request(self.number, rows_U, staleness=None if wanted else 0)
        self._read = True
        if wanted:
            self._last_pass_read = self._callbacks.passes_left() <= 1
        return self._wait(number)

    def _wait(self, number: int) -> Array:
        with self._callbacks.around_wait():
            return self._tables.read(number)

    def prefetch(self, indices: Tensor) -> None:
        """Request the rows of the indices of the next forward pass, and return at once."""
        rows_U, _ = distinct(indices, self.spec.rows, self._padding_idx, f"'{self.spec.name}'")
        ahead = int(self._last_pass_read)
        clock = self._tables.clock(self.number) + ahead
        if self._prefetched.get(rows_U.tobytes(), (-1, -1))[0] == clock:
            return
        number = self._tables.request(self.number, rows_U, ahead=ahead)
        self._prefetched[rows_U.tobytes()] = clock, number

    def gradients(self) -> Iterator[tuple[RowIds, Array]]:
        """Yield this step's gradients of rows, and drop them."""
        raise NotImplementedError

    def push(self, rate: float) -> None:
        """End the iteration: push the sum of the gradients of each row."""
        if not self._read:
            self._wait(self._tables.request(self.number, NO_ROWS))
        rows_U, gradient_Ud = sum_by_row(list(self.gradients()), self.spec.dim)
        self._tables.push(self.number, rows_U, gradient_Ud, rate=rate)
        self._read = self._last_pass_read = False
        clock = self._tables.clock(self.number)
        for rows, (wanted, number) in list(self._prefetched.items()):
            if wanted < clock:
                self._tables.forget(number)
                del self._prefetched[rows]

    def drop(self) -> None:
        for _ in self.gradients():
            pass

    def stored(self) -> Iterator[tuple[RowIds, list[Array]]]:
        """Yield the rows that gradients have changed, with their histories; on rank 0."""
        return self._tables.stored(self.number)

    @property
    def clock(self) -> int:
        """Number of the iterations of the table."""
        return self._tables.clock(self.number)

    def restore(self, clock: int, pieces: Pieces | None) -> None:
        """Continue at a clock with these rows, which rank 0 has. A collection follows."""
        self._tables.restore(self.number, clock, pieces)

    def settle(self) -> None:
        """Bring what the worker holds of the table up to date."""

    def close(self) -> None:
        """Leave the module."""


class TableRows(TableLink):
    """The link of a `Table`: a leaf for each lookup. It is the table's `Lookup`."""

    def __init__(self, planned: PlannedTable, tables: RowTables, callbacks: Callbacks) -> None:
        super().__init__(planned, tables, callbacks)
        self._leaves: list[tuple[RowIds, Tensor]] = []
        assert isinstance(planned.module, Table)
        self._module = planned.module
        self._padding_idx = planned.module.padding_idx
        self._module.lookup = self

    def rows(self, rows_U: RowIds, device: torch.device) -> Tensor:
        self._callbacks.on_forward()
        leaf = torch.from_numpy(self.pull(rows_U)).to(device)
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(self._callbacks.on_gradient)
            self._leaves.append((rows_U, leaf))
        return leaf

    def gradients(self) -> Iterator[tuple[RowIds, Array]]:
        for rows_U, leaf in self._leaves:
            if leaf.grad is not None:
                yield rows_U, leaf.grad.detach().cpu().numpy()
        self._leaves.clear()

    def close(self) -> None:
        self._module.lookup = None


class EmbeddingRows(TableLink):
    """The link of the weight of a sparse embedding."""

    def __init__(self, planned: PlannedTable, tables: RowTables, callbacks: Callbacks) -> None:
        super().__init__(planned, tables, callbacks)
        assert isinstance(planned.module, nn.Embedding | nn.EmbeddingBag)
        self.weight = planned.module.weight
        self._is_whole = True
        """Whether all rows are those after this worker's last push."""
        self._reads = Reads(planned.module, {0: self.weight}, self._settle)
        self._version = self.weight._version
        module = planned.module
        self._handles: list[RemovableHandle] = [
            self.weight.register_post_accumulate_grad_hook(callbacks.on_gradient),
            module.register_forward_pre_hook(OfOneModule(self._refresh), with_kwargs=True),
            module.register_forward_hook(OfOneModule(self._leave), always_call=True),
            module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                OfOneModule(self._settle)
            ),
        ]

    def give(self, *, root: bool) -> None:
        """Give rank 0's weight, which all workers have, to the shards. A collection follows."""
        super().restore(0, self._first_values() if root else None)

    def _first_values(self) -> Iterator[tuple[RowIds, list[Array]]]:
        """Yield all rows, and zeros as their histories."""
        for rows_N in _pieces(self.spec.rows):
            zeros = [np.zeros((len(rows_N), w), np.float32) for w in self.spec.history_widths]
            yield rows_N, [self._of(rows_N), *zeros]

    def _of(self, rows_N: RowIds) -> Array:
        with DisableTorchFunctionSubclass():
            values = self.weight.detach()[_places(rows_N, self.weight)].cpu().numpy()
        return np.ascontiguousarray(values)

    def _refresh(
        self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        indices = arguments[0] if arguments else named["input"]
        rows_U, _ = distinct(indices, self.spec.rows, self._padding_idx, f"'{self.spec.name}'")
        self._callbacks.on_forward()
        with self._reads.turn:
            self._check_unchanged()
            self._write(rows_U, self.pull(rows_U))
            self._reads.came(0)

    def _leave(self, *_: object) -> None:
        if not self._is_whole:
            self._reads.leave()

    def settle(self) -> None:
        with self._reads.turn:
            if not self._is_whole:
                self._check_unchanged()
                with torch.no_grad():
                    for rows_N in _pieces(self.spec.rows):
                        self._write(rows_N, self.pull(rows_N))
                self._is_whole = True
            self._reads.came(0)

    def _settle(self, *_: object) -> None:
        self.settle()

    def push(self, rate: float) -> None:
        with self._reads.turn:
            self._check_unchanged()
            super().push(rate)
            self._is_whole = False
            self._reads.leave()
            self._reads.read_aliased()

    def restore(self, clock: int, pieces: Pieces | None) -> None:
        super().restore(clock, pieces)
        self._is_whole = False
        self._version = self.weight._version
        self._reads.leave()

    def _check_unchanged(self) -> None:
        if self.weight._version != self._version:
            raise UsageError(
                f"'{self.spec.name}' was changed by the script after distribute(), but the "
                "shards' rows would replace it; change it before distribute()"
            )

    def _write(self, rows_N: RowIds, values_Nd: Array) -> None:
        with DisableTorchFunctionSubclass():
            # Its data: the script does not change values that come from the shards.
            self.weight.data[_places(rows_N, self.weight)] = torch.from_numpy(values_Nd).to(
                self.weight.device
            )

    def gradients(self) -> Iterator[tuple[RowIds, Array]]:
        gradient, self.weight.grad = self.weight.grad, None
        if gradient is None:
            return
        if gradient.layout is not torch.sparse_coo:
            raise UsageError(
                f"the gradient of '{self.spec.name}' is dense, although its module is sparse; only "
                "its own module may use it"
            )
        gradient = gradient.coalesce()
        yield (
            gradient.indices()[0].cpu().numpy().astype(np.uint32),
            gradient.values().cpu().numpy(),
        )

    def close(self) -> None:
        self._reads.all_came()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def link_of(planned: PlannedTable, tables: RowTables, callbacks: Callbacks) -> TableLink:
    kind = TableRows if isinstance(planned.module, Table) else EmbeddingRows
    return kind(planned, tables, callbacks)


def _pieces(rows: int) -> Iterator[RowIds]:
    for first in range(0, rows, PIECE_ROWS):
        yield np.arange(first, min(first + PIECE_ROWS, rows), dtype=np.uint32)


def _places(rows_N: RowIds, weight: Tensor) -> Tensor:
    return torch.from_numpy(rows_N.astype(np.int64)).to(weight.device)
