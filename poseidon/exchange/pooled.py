"""Small tensors share a table.

A table costs a worker and a shard the same work for ten numbers as for ten thousand: a call for its gradient, a message
to the shard and one back. A net with batch normalization has hundreds of small tensors, with less than a hundredth of
its bytes. `PooledExchange` concatenates those of one rule into pools, and an inner exchange moves the pools.

Laws:

* The weights are those of the inner exchange without pools, to the bit: a rule treats all elements alike.
* A pool leaves when the gradient of its last tensor has come. Its priority is that of its first tensor.
  Its bytes are so few that neither costs measurable time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array, Exchange, ExchangeState, History, Trained
from poseidon.exchange.observe.statistics import CountsTraffic, Traffic

SMALL_TENSOR_ELEMENTS = 4 * 1024
"""Largest tensor that shares a table: 16 KiB."""
POOL_ELEMENTS = 16 * 1024
"""Largest pool: 64 KiB, a quarter of a packet."""


class EarlyExchange(Exchange, CountsTraffic, Protocol):
    """An exchange through the shards, whose means can be read in the iteration that they are of."""

    def skip(self, index: int) -> None:
        """Leave tensor `index`, a mean, as it is in this iteration, in place of `begin`; all replicas do."""

    def wait_early(self, index: int) -> None:
        """Return once tensor `index`, which has begun, has the value that follows from this iteration."""


def pools_of(tensors: Sequence[Trained], apart: Collection[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Return which tensors share a table: the indices of each pool.

    Each index occurs once. Those of a pool are in order, and pools are in the order of their first tensors.

    Args:
        tensors: to be pooled.
        apart: indices of tensors that share no table.
    """
    pools: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    for index, trained in enumerate(tensors):
        size, kind = trained.tensor.numel(), (trained.rule, trained.statistics, trained.tensor.device)
        pool = filling.get(kind)
        if index in apart or size > SMALL_TENSOR_ELEMENTS:
            pools.append([index])
        elif pool is None or size + sum(tensors[i].tensor.numel() for i in pool) > POOL_ELEMENTS:
            filling[kind] = [index]
            pools.append(filling[kind])
        else:
            pool.append(index)
    return tuple(map(tuple, pools))


def pool_tensors(tensors: Sequence[Trained], pools: Sequence[Sequence[int]]) -> list[Trained]:
    """Return what the inner exchange trains: a flat tensor for each pool; a tensor that is alone as it is."""
    return [_concatenated([tensors[index] for index in pool]) for pool in pools]


def _concatenated(members: Sequence[Trained]) -> Trained:
    if len(members) == 1:
        return members[0]
    flat = torch.cat([member.tensor.detach().reshape(-1) for member in members])
    first = members[0]
    name = f"{first.name} and {len(members) - 1} more"
    return Trained(name=name, tensor=flat, rule=first.rule, statistics=first.statistics)


class PooledExchange:
    """See `Exchange`.

    Args:
        inner: the exchange of the pools, made by `pool_tensors`; this exchange closes it.
        traffic: counts the traffic of the pools.
        tensors: what to keep together.
        pools: made by `pools_of`.
        pooled: made by `pool_tensors`.
    """

    def __init__(
        self,
        inner: EarlyExchange,
        traffic: CountsTraffic,
        tensors: Sequence[Trained],
        pools: Sequence[Sequence[int]],
        pooled: Sequence[Trained],
    ) -> None:
        self._inner = inner
        self._traffic = traffic
        self._tensors = tensors
        self._pools = pools
        self._table = {index: table for table, pool in enumerate(pools) for index in pool}
        self._shared = {
            table: _Pool([tensors[index].tensor for index in pool], pooled[table])
            for table, pool in enumerate(pools)
            if len(pool) > 1
        }
        self._position = {index: position for pool in pools for position, index in enumerate(pool)}
        self.by_factors = frozenset(i for i, table in self._table.items() if table in inner.by_factors)
        self.state = PooledState(inner.state, tensors, pools)
        self.control = inner.control

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        for pool in self._shared.values():
            pool.pack()
        pooled = histories and [
            _concatenated_history([histories[index] for index in pool]) for pool in self._pools
        ]
        self._inner.open(pooled, clock)
        for pool in self._shared.values():
            pool.unpack()

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        for pool in self._shared.values():
            pool.start()
        self._inner.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        table = self._table[index]
        pool = self._shared.get(table)
        if pool is None:
            self._inner.begin(table, gradient)
        elif pool.add(self._position[index], gradient):
            self._inner.begin(table, pool.gradient)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self._inner.begin_factors(self._table[index], u_KN, v_KM)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        self._inner.release(self._table[index])

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        table = self._table[index]
        pool = self._shared.get(table)
        if pool is None:
            self._inner.wait(table)
        elif not pool.is_read:
            self._inner.wait(table)
            pool.unpack()

    def skip(self, index: int) -> None:
        """See `EarlyExchange`."""
        self._inner.skip(self._table[index])

    def wait_early(self, index: int) -> None:
        """See `EarlyExchange`. The tensor shares no table."""
        self._inner.wait_early(self._table[index])

    def finish(self) -> None:
        """See `Exchange`."""
        for table, pool in self._shared.items():
            if pool.statistics:
                pool.pack()
            elif pool.complete():
                self._inner.begin(table, pool.gradient)
        self._inner.finish()

    def settle(self) -> None:
        """See `Exchange`."""
        self._inner.settle()
        for pool in self._shared.values():
            pool.unpack()

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`. The bytes of a pool are divided among its tensors by their sizes."""
        found = {}
        for table, traffic in self._traffic.traffic().items():
            sizes = [self._tensors[index].tensor.numel() for index in self._pools[table]]
            for index, size in zip(self._pools[table], sizes, strict=True):
                found[index] = Traffic(
                    bytes_out=traffic.bytes_out * size // sum(sizes),
                    bytes_in=traffic.bytes_in * size // sum(sizes),
                    on_way_s=traffic.on_way_s,
                    held_back=traffic.held_back,
                )
        return found

    def close(self) -> None:
        """See `Exchange`."""
        self._inner.close()


class PooledState:
    """See `ExchangeState`.

    Args:
        inner: the state of the pools.
        tensors: all of them.
        pools: made by `pools_of`.
    """

    def __init__(
        self, inner: ExchangeState, tensors: Sequence[Trained], pools: Sequence[Sequence[int]]
    ) -> None:
        self._inner = inner
        self._tensors = tensors
        self._pools = pools
        self.private = inner.private

    def histories(self) -> list[History]:
        """See `ExchangeState`."""
        found: list[History] = [()] * len(self._tensors)
        for table, history in enumerate(self._inner.histories()):
            pool = self._pools[table]
            shapes = [tuple(self._tensors[index].tensor.shape) for index in pool]
            for index, own in zip(pool, _split_history(history, shapes), strict=True):
                found[index] = own
        return found

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        return self._inner.held_back()

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""
        self._inner.hold_back(held_back)

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        return self._inner.replicated()


class _Pool:
    """Tensors that share a table, their flat tensor, and the gradients that have come.

    Args:
        tensors: the module's own.
        pooled: their flat tensor, which the inner exchange moves.
    """

    def __init__(self, tensors: Sequence[Tensor], pooled: Trained) -> None:
        self.statistics = pooled.statistics
        self.is_read = False
        """Whether the tensors have this iteration's values."""
        self.gradient = torch.zeros_like(pooled.tensor)
        bounds = list(pairwise(accumulate((t.numel() for t in tensors), initial=0)))
        self._own = [tensor.detach().reshape(-1) for tensor in tensors]
        self._pooled = [pooled.tensor[start:stop] for start, stop in bounds]
        self._gradients = [self.gradient[start:stop] for start, stop in bounds]
        self._missing = set(range(len(tensors)))

    def start(self) -> None:
        """Begin an iteration."""
        self.is_read = False
        self._missing = set(range(len(self._own)))

    def add(self, position: int, gradient: Tensor) -> bool:
        """Add the gradient of a tensor. Return whether it was the last."""
        self._gradients[position].copy_(gradient.detach().reshape(-1))
        self._missing.discard(position)
        return not self._missing

    def complete(self) -> bool:
        """Set the missing gradients of an incomplete pool to zero. Return whether some had come, and some had not."""
        partly = 0 < len(self._missing) < len(self._own)
        for position in self._missing if partly else ():
            self._gradients[position].zero_()
        self._missing.clear()
        return partly

    def pack(self) -> None:
        """Copy the module's tensors to the flat one."""
        torch._foreach_copy_(self._pooled, self._own)

    def unpack(self) -> None:
        """Copy the flat tensor to the module's."""
        torch._foreach_copy_(self._own, self._pooled)
        self.is_read = True


def _concatenated_history(histories: Sequence[History]) -> History:
    if len(histories) == 1:
        return histories[0]
    return [
        np.concatenate([np.asarray(array, np.float32).reshape(-1) for array in column])
        for column in zip(*histories, strict=True)
    ]


def _split_history(history: History, shapes: Sequence[tuple[int, ...]]) -> list[list[Array]]:
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends = list(accumulate(sizes))[:-1]
    columns = [np.split(array.reshape(-1), ends) for array in history]
    return [[column[i].reshape(shape) for column in columns] for i, shape in enumerate(shapes)]
