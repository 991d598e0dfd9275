"""How tensors are placed in the tables of a store: each in a table of its own, or small ones together in
a pool.

A table costs a worker and a shard the same work for ten numbers as for ten thousand: a call for its
gradient, a message to the shard and one back. A net with batch normalization has hundreds of small
tensors, with less than a hundredth of its bytes. So tensors of one rule and rate are concatenated into
pools, which have a table each. A matrix that its rule sees whole stays out of pools.

Laws:
* A table for each tensor gives the same weights, to the bit: a rule treats all elements alike.
* A pool leaves when the gradient of its last tensor has come. It has the priority of its first tensor.
  Its bytes are so few that neither costs measurable time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.carrier import CarrierState, Step
from poseidon.exchange.observer import Traffic
from poseidon.exchange.server.tables import ServerTables

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
    def open(self, histories: Sequence[History] | None, given: Mapping[str, Array]) -> History:
        """Prepare the table for its first value. Return the table's history.

        Args:
            given: what codecs have held back; else it is zero.
        """

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

    def kept(self, arrays: Sequence[Array] | None) -> Mapping[int, History]:
        """Return the histories, from what the shards have kept of the table; None: nothing."""
        return self.histories()

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

    def kept(self, arrays: Sequence[Array] | None) -> Mapping[int, History]:
        tables, table = self._tables, self.table
        return self.shaped(
            tables.own_history(table) if arrays is None else tables.history_in(table, arrays)
        )


class PlacedAlone(InTable):
    """A tensor with a table of its own."""

    def __init__(self, index: int, table: int, trained: Trained, tables: ServerTables) -> None:
        self.indices = (index,)
        self.table = table
        self._shape = tuple(trained.tensor.shape)
        self._tables = tables

    def open(self, histories: Sequence[History] | None, given: Mapping[str, Array]) -> History:
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


SMALL_TENSOR_ELEMENTS = 4 * 1024
"""Largest tensor that shares a table: 16 KiB."""
POOL_ELEMENTS = 16 * 1024
"""Largest pool: 64 KiB, a quarter of a packet."""


def pools_of(
    tensors: Sequence[Trained], apart: Collection[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return which tensors share a table: the indices of each pool.

    Each index occurs once. The indices of a pool are in order, and pools are in the order of their
    first tensors.

    Args:
        apart: indices of tensors that share no table.
    """
    pools: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    for index, trained in enumerate(tensors):
        size = trained.tensor.numel()
        kind = trained.rule, trained.rate_index, trained.statistics, trained.tensor.device
        pool = filling.get(kind)
        is_whole = trained.rule.matrix is not None
        if index in apart or size > SMALL_TENSOR_ELEMENTS or is_whole:
            pools.append([index])
        elif pool is None or size + sum(tensors[i].tensor.numel() for i in pool) > POOL_ELEMENTS:
            filling[kind] = [index]
            pools.append(filling[kind])
        else:
            pool.append(index)
    return tuple(map(tuple, pools))


def pool_tensors(tensors: Sequence[Trained], pools: Sequence[Sequence[int]]) -> list[Trained]:
    """Return what the tables hold: a flat tensor for each pool; a tensor that is alone as it is."""
    return [_concatenated([tensors[index] for index in pool]) for pool in pools]


def _concatenated(members: Sequence[Trained]) -> Trained:
    if len(members) == 1:
        return members[0]
    flat = torch.cat([member.tensor.detach().reshape(-1) for member in members])
    first = members[0]
    name = f"{first.name} and {len(members) - 1} more"
    return replace(first, name=name, tensor=flat, factor_rows=0, looked_up=False)


class Pool(InTable):
    """Tensors that share a table, their flat tensor, and the gradients that have come.

    Args:
        pooled: their flat tensor, made by `pool_tensors`.
    """

    def __init__(
        self,
        indices: Sequence[int],
        table: int,
        tensors: Sequence[Trained],
        pooled: Trained,
        tables: ServerTables,
    ) -> None:
        self.indices = indices
        self.table = table
        self._tables = tables
        self._statistics = pooled.statistics
        self._is_read = False  # whether the tensors have the values after the last `finish`
        own = self._own = [tensors[index].tensor.detach() for index in indices]
        bounds = list(pairwise(accumulate((t.numel() for t in own), initial=0)))
        self._pooled = [
            pooled.tensor[start:stop].view(tensor.shape)
            for tensor, (start, stop) in zip(own, bounds, strict=True)
        ]
        pushes = len(tables.nodes(table))
        self._flat = [torch.zeros_like(pooled.tensor) for _ in range(pushes)]  # of each push
        self._gradients = [
            {index: flat[start:stop] for index, (start, stop) in zip(indices, bounds, strict=True)}
            for flat in self._flat
        ]
        self._begin()

    def _begin(self) -> None:
        self._pushed = 0
        self._taken = dict.fromkeys(self.indices, 0)  # in this iteration, of each tensor
        self._missing = [set(self.indices) for _ in self._flat]  # of each push

    def open(self, histories: Sequence[History] | None, given: Mapping[str, Array]) -> History:
        self._pack()
        of_each = [histories[index] for index in self.indices] if histories else []
        return [
            np.concatenate([np.asarray(array, np.float32).reshape(-1) for array in column])
            for column in zip(*of_each, strict=True)
        ]

    def start(self, step: Step) -> None:
        self._begin()

    def take(self, index: int, gradient: Tensor) -> Push | None:
        """See `Placed`. One tensor may come for all pushes before another comes for the first."""
        number = self._taken[index]
        self._taken[index] += 1
        self._gradients[number][index].copy_(gradient.detach().reshape(-1))
        self._missing[number].discard(index)
        return None if self._missing[number] else self._next_push()

    def _next_push(self) -> Push:
        flat = self._flat[self._pushed]
        self._pushed += 1
        return self.table, flat

    def wait(self, index: int) -> None:
        if not self._is_read:
            self._tables.read(self.table)
            self.take_values()

    def complete(self) -> Sequence[Push]:
        """Set the missing gradients to zero, where only some have come."""
        missing = self._missing[self._pushed] if self._pushed < len(self._flat) else set()
        partly = 0 < len(missing) < len(self.indices)
        for index in missing if partly else ():
            self._gradients[self._pushed][index].zero_()
        return [self._next_push()] if partly else []

    def finish(self) -> None:
        self._is_read = False
        if self._statistics:
            self._pack()

    def shaped(self, history: Sequence[Array]) -> Mapping[int, History]:
        sizes = [part.numel() for part in self._own]
        columns = [np.split(array, list(accumulate(sizes))[:-1]) for array in history]
        return {
            index: [column[place].reshape(tuple(own.shape)) for column in columns]
            for place, (index, own) in enumerate(zip(self.indices, self._own, strict=True))
        }

    def traffic(self, tables: Sequence[Traffic]) -> Mapping[int, Traffic]:
        """Divide the bytes among the tensors by their sizes."""
        whole, total = tables[self.table], self._flat[0].numel()
        return {
            index: Traffic(
                bytes_out=whole.bytes_out * size // total,
                bytes_in=whole.bytes_in * size // total,
                on_way_s=whole.on_way_s,
                held_back=whole.held_back,
            )
            for index, size in zip(self.indices, (t.numel() for t in self._own), strict=True)
        }

    def _pack(self) -> None:
        torch._foreach_copy_(self._pooled, self._own)

    def take_values(self) -> None:
        torch._foreach_copy_(self._own, self._pooled)
        self._is_read = True
