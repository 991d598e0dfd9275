"""Small tensors share a table.

A table costs a worker and a shard the same work for ten numbers as for ten thousand: a call for its gradient, a message
there and one back. A net with batch normalization has hundreds of such tensors, which carry less than a hundredth of its
bytes. Here those of one rule are laid one after the other into pools, and another exchange moves pools.

Laws: the weights are those of the inner exchange without pools, to the bit, since rules treat elements alike. A pool leaves
when the gradient of its last tensor has come, and is as urgent as the first of them: its bytes are so few that
neither is felt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array, Exchange, ExchangeState, History, Trained
from poseidon.exchange.observe.traffic import CountsTraffic, Traffic

SMALL = 4 * 1024
"""Most elements of a tensor that shares a table: 16 KiB."""
FULL = 16 * 1024
"""Most elements of a pool: 64 KiB, a quarter of a packet."""


def pools_of(tensors: Sequence[Trained], apart: Collection[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Which tensors share a table: indices, each once, those of a pool in order, pools in the order of their first.

    Args:
        tensors: one table each, if it were not for this.
        apart: indices of those that share with nobody.
    """
    pools: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    for index, trained in enumerate(tensors):
        size, kind = trained.tensor.numel(), (trained.rule, trained.statistics, trained.tensor.device)
        pool = filling.get(kind)
        if index in apart or size > SMALL:
            pools.append([index])
        elif pool is None or size + sum(tensors[i].tensor.numel() for i in pool) > FULL:
            filling[kind] = [index]
            pools.append(filling[kind])
        else:
            pool.append(index)
    return tuple(map(tuple, pools))


def lay_together(tensors: Sequence[Trained], pools: Sequence[Sequence[int]]) -> list[Trained]:
    """What the inner exchange trains: a flat tensor for each pool, and each tensor that is alone as it is."""
    return [_together([tensors[index] for index in pool]) for pool in pools]


def _together(members: Sequence[Trained]) -> Trained:
    if len(members) == 1:
        return members[0]
    flat = torch.cat([member.tensor.detach().reshape(-1) for member in members])
    first = members[0]
    name = f"{first.name} and {len(members) - 1} more"
    return Trained(name=name, tensor=flat, rule=first.rule, statistics=first.statistics)


class PooledExchange:
    """See `Exchange`.

    Args:
        inner: moves what `lay_together` has made; this exchange closes it.
        traffic: counts what that costs.
        tensors: what to keep together.
        pools: made by `pools_of`.
        laid: made by `lay_together`.
    """

    def __init__(
        self,
        inner: Exchange,
        traffic: CountsTraffic,
        tensors: Sequence[Trained],
        pools: Sequence[Sequence[int]],
        laid: Sequence[Trained],
    ) -> None:
        self._inner = inner
        self._traffic = traffic
        self._tensors = tensors
        self._pools = pools
        self._table = {index: table for table, pool in enumerate(pools) for index in pool}
        self._shared = {
            table: _Pool([tensors[index].tensor for index in pool], laid[table])
            for table, pool in enumerate(pools)
            if len(pool) > 1
        }
        self._place = {index: place for pool in pools for place, index in enumerate(pool)}
        self.by_factors = frozenset(i for i, table in self._table.items() if table in inner.by_factors)
        self.state = PooledState(inner.state, tensors, pools)
        self.control = inner.control

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        for pool in self._shared.values():
            pool.collect()
        laid = histories and [_laid([histories[index] for index in pool]) for pool in self._pools]
        self._inner.open(laid, clock)
        for pool in self._shared.values():
            pool.spread()

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
        elif pool.add(self._place[index], gradient):
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
            pool.spread()

    def finish(self) -> None:
        """See `Exchange`."""
        for table, pool in self._shared.items():
            if pool.statistics:
                pool.collect()
            elif pool.complete():
                self._inner.begin(table, pool.gradient)
        self._inner.finish()

    def settle(self) -> None:
        """See `Exchange`."""
        self._inner.settle()
        for pool in self._shared.values():
            pool.spread()

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`; a pool's bytes are its tensors' by their sizes."""
        found = {}
        for table, traffic in self._traffic.traffic().items():
            sizes = [self._tensors[index].tensor.numel() for index in self._pools[table]]
            for index, size in zip(self._pools[table], sizes, strict=True):
                found[index] = Traffic(
                    bytes_out=traffic.bytes_out * size // sum(sizes),
                    bytes_in=traffic.bytes_in * size // sum(sizes),
                    on_way_s=traffic.on_way_s,
                )
        return found

    def close(self) -> None:
        """See `Exchange`."""
        self._inner.close()


class PooledState:
    """See `ExchangeState`.

    Args:
        inner: of the pools.
        tensors: the pools' tensors.
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
            for index, own in zip(pool, _taken_apart(history, shapes), strict=True):
                found[index] = own
        return found

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        return self._inner.replicated()


class _Pool:
    """Tensors that share a table, their one flat tensor, and the gradients that have come.

    Args:
        tensors: the module's own.
        laid: their flat tensor, which the inner exchange moves.
    """

    def __init__(self, tensors: Sequence[Tensor], laid: Trained) -> None:
        self.statistics = laid.statistics
        self.is_read = False
        """Whether the tensors have this iteration's values."""
        self.gradient = torch.zeros_like(laid.tensor)
        bounds = list(pairwise(accumulate((t.numel() for t in tensors), initial=0)))
        self._own = [tensor.detach().reshape(-1) for tensor in tensors]
        self._laid = [laid.tensor[start:stop] for start, stop in bounds]
        self._gradients = [self.gradient[start:stop] for start, stop in bounds]
        self._missing = set(range(len(tensors)))

    def start(self) -> None:
        """A new iteration."""
        self.is_read = False
        self._missing = set(range(len(self._own)))

    def add(self, place: int, gradient: Tensor) -> bool:
        """A gradient has come; returns whether it was the last."""
        self._gradients[place].copy_(gradient.detach().reshape(-1))
        self._missing.discard(place)
        return not self._missing

    def complete(self) -> bool:
        """Nothing more will come: what has not is zero. Returns whether some has come and some has not."""
        partly = 0 < len(self._missing) < len(self._own)
        for place in self._missing if partly else ():
            self._gradients[place].zero_()
        self._missing.clear()
        return partly

    def collect(self) -> None:
        """Bring the flat tensor to what the module has made of its own."""
        torch._foreach_copy_(self._laid, self._own)

    def spread(self) -> None:
        """Bring the module's tensors to what has come for the flat one."""
        torch._foreach_copy_(self._own, self._laid)
        self.is_read = True


def _laid(histories: Sequence[History]) -> History:
    if len(histories) == 1:
        return histories[0]
    return [
        np.concatenate([np.asarray(array, np.float32).reshape(-1) for array in column])
        for column in zip(*histories, strict=True)
    ]


def _taken_apart(history: History, shapes: Sequence[tuple[int, ...]]) -> list[list[Array]]:
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends = list(accumulate(sizes))[:-1]
    columns = [np.split(array.reshape(-1), ends) for array in history]
    return [[column[i].reshape(shape) for column in columns] for i, shape in enumerate(shapes)]
