"""How tensors are placed in the tables of a store: the contract, and a tensor with a table of
its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.carrier import CarrierState, KeptHistories, Step
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.server.tables import ServerTables
from ps_server.client import ComingHistory

Push = tuple[int, Tensor]
"""A table, and what to push to it."""


class Placed(CarrierState, ABC):
    """Tensors that share a table, or one tensor with its tables. A carrier makes the same calls.

    Attributes:
        indices: of the tensors in the exchange.
        table: that has their first values.
    """

    indices: Sequence[int]
    table: int

    @abstractmethod
    def open(self, histories: Sequence[History] | None) -> History:
        """Prepare the table for its first value. Return the table's history."""

    def start(self, step: Step) -> None:
        """Begin an iteration."""

    @abstractmethod
    def take(self, index: int, gradient: Tensor) -> Push | None:
        """Take the gradient of a tensor. Return what to push now, if anything."""

    @abstractmethod
    def wait(self, index: int) -> None:
        """Return once a tensor may be used."""

    def memory_of(self, into: Mapping[int, History]) -> Sequence[Array] | None:
        """Return the arrays of a history that its table may be written to, flat; None: none."""
        return None

    def kept(self, coming: ComingHistory | None) -> KeptHistories:
        """Return the histories that come from the shards; None: they are here."""
        return KeptHistories.here(self.histories())

    def complete(self) -> Sequence[Push]:
        """Note that no gradient comes any more in this iteration. Return what to push now."""
        return ()

    def finish(self) -> None:
        """End the iteration, before tables without a push get zeros."""

    def take_values(self) -> None:
        """Take the values in the table: the first ones, or the values after all iterations that
        have finished.
        """

    @abstractmethod
    def traffic(self, tables: Sequence[Traffic]) -> Mapping[int, Traffic]:
        """Return the traffic of each tensor, from the traffic of all tables."""


class InTable(Placed):
    """Tensors whose values and histories are in one table."""

    _tables: ServerTables

    @abstractmethod
    def shaped(self, history: Sequence[Array]) -> Mapping[int, History]:
        """Return the tensors' histories, from the table's, which is flat."""

    def histories(self) -> Mapping[int, History]:
        return self.shaped(self._tables.history(self.table))

    def kept(self, coming: ComingHistory | None) -> KeptHistories:
        if coming is None:
            return super().kept(None)

        def found(arrays: Sequence[Array]) -> Mapping[int, History]:
            return self.shaped(self._tables.history_in(self.table, arrays))

        def poll() -> Mapping[int, History] | None:
            arrays = coming.poll()
            return None if arrays is None else found(arrays)

        return KeptHistories(poll, lambda: found(coming.result()))


class PlacedAlone(InTable):
    """A tensor with a table of its own."""

    def __init__(self, index: int, table: int, trained: Trained, tables: ServerTables) -> None:
        self.indices = (index,)
        self.table = table
        self._shape = tuple(trained.tensor.shape)
        self._tables = tables

    def open(self, histories: Sequence[History] | None) -> History:
        return histories[self.indices[0]] if histories else ()

    def take(self, index: int, gradient: Tensor) -> Push | None:
        return self.table, gradient

    def wait(self, index: int) -> None:
        self._tables.read(self.table)

    def shaped(self, history: Sequence[Array]) -> Mapping[int, History]:
        return {self.indices[0]: [array.reshape(self._shape) for array in history]}

    def memory_of(self, into: Mapping[int, History]) -> Sequence[Array] | None:
        history = into.get(self.indices[0])
        return None if history is None else [array.reshape(-1) for array in history]

    def traffic(self, tables: Sequence[Traffic]) -> Mapping[int, Traffic]:
        return {self.indices[0]: tables[self.table]}
