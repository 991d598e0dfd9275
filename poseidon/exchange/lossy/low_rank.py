"""PowerSGD: a matrix travels as two thin ones whose product is near it (Vogels
et al., NeurIPS 2019, algorithms 1 and 2).

For a tensor as an n x m matrix, its mean over the workers in two rounds through the shards:

    M = gradient + what was held back          on each worker
    P = M Q              n x r                 pushed; the shards average
    P = orthonormal columns of the mean P      on each worker, with the same bits
    Q = M^T P            m x r                 pushed; the shards average
    mean gradient = P Q^T; held back = M - P Q^T; Q is where the next iteration starts

The second round belongs to the same iteration: `wait_early` returns when the mean of P has come, before the clock
moves. The P of all tensors are under way together. P and Q are tables of their own (`RuleKind.MEAN`). The tensor's own
table is a copy, which brings the first value to all workers; its rule runs on each worker.

Before the iteration `start` the mean gradient itself is a third table of means. In each iteration all workers skip the
tables that they do not use (`ps_server.Client.skip`). A shard answers when all have skipped. A worker waits for that
before it uses the table again: the workers' messages to different shards have no common order.

P and Q may have a codec of their own. What it loses is a part of M - P Q^T, so it is held back with the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import (
    Array,
    ExchangeSettings,
    ExchangeState,
    History,
    Trained,
    WholeGradients,
)
from poseidon.exchange.lossy.low_rank_matrix import LowRank, LowRankMatrix
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.pooled import EarlyExchange
from poseidon.exchange.replicas import Arithmetic, arithmetic_sample, check_rules, checksum
from ps_server import RemoteProtocolError
from ps_server.rules import sum_of_squares


class LowRankExchange(WholeGradients):
    """See `Exchange`.

    Args:
        inner: the exchange of all `factors` in their order, then of `tensors`, of which those that
            have factors are copies; this exchange closes it.
        tensors: what to keep together.
        factors: made by `low_rank_tensors`.
        chosen: how each of these tensors travels, by index.
        settings: common to all tensors; without a limit of the norm.
        equal_bits: whether all workers must compute the same bits by the rules; if not, a difference is a warning.
    """

    def __init__(
        self,
        inner: EarlyExchange,
        tensors: Sequence[Trained],
        factors: Mapping[int, Sequence[Trained]],
        chosen: Mapping[int, LowRank],
        settings: ExchangeSettings,
        *,
        equal_bits: bool,
    ) -> None:
        self._inner = inner
        self._equal_bits = equal_bits
        self._sampled = [tensors[index] for index in factors]
        self._scale = settings.gradient_scale
        self._first = 0
        self._matrices: dict[int, LowRankMatrix] = {}
        for index, parts in factors.items():
            own = [part.tensor for part in parts]
            self._matrices[index] = LowRankMatrix(tensors[index], self._first, own, chosen[index].start)
            self._first += len(parts)
        self._rate, self._iteration = 0.0, settings.start_clock
        self.by_factors = frozenset(index - self._first for index in inner.by_factors)
        self.state = LowRankState(inner.state, self._matrices, self._first)
        self.control = inner.control

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        self.state.restore(histories)
        self._inner.open(histories and [*[()] * self._first, *histories], clock)
        if clock is None:
            self._compare_rules()

    def _compare_rules(self) -> None:
        """Compare the results of the rules over all workers, and the first Q: processors may draw different numbers."""
        sample = arithmetic_sample(self._sampled)
        first_q = "-".join(checksum(matrix.first_q) for matrix in self._matrices.values())
        own = replace(sample, rules=f"{sample.rules} {first_q}").to_json()
        samples = []
        for rank, payload in enumerate(self.control.all_gather(json.dumps(own).encode())):
            try:
                samples.append(Arithmetic.from_json(json.loads(payload)))
            except (ValueError, KeyError, TypeError) as error:
                raise RemoteProtocolError(f"worker {rank} sent no results of its update rules") from error
        check_rules(samples, required=self._equal_bits)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._inner.start(iteration, rate)
        self._iteration, self._rate = iteration, rate

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        matrix = self._matrices.get(index)
        if matrix is None:
            self._inner.begin(index + self._first, gradient)
        else:
            self.wait(index)
            for place in matrix.unused:
                self._inner.wait(place)
            if self._iteration < matrix.start:
                self._inner.begin(matrix.place + 2, matrix.take_exact(gradient.detach()))
            else:
                self._inner.begin(matrix.place, matrix.take(gradient.detach(), self._scale))

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        if index in self.by_factors:
            self._inner.begin_factors(index + self._first, u_KN, v_KM)
        else:
            super().begin_factors(index, u_KN, v_KM)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        self._inner.release(index + self._first)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        matrix = self._matrices.get(index)
        if matrix is None:
            self._inner.wait(index + self._first)
        elif matrix.is_due:
            self._inner.wait(matrix.place + (2 if matrix.is_exact else 1))
            matrix.apply()

    def finish(self) -> None:
        """See `Exchange`."""
        for index, matrix in self._matrices.items():
            if not matrix.begun:
                self.begin(index, torch.zeros_like(matrix.value))
        for matrix in self._matrices.values():
            matrix.end(self._rate, self._iteration)
            if not matrix.is_exact:
                self._inner.wait_early(matrix.place)
                self._inner.begin(matrix.place + 1, matrix.second(self._scale))
            for place in matrix.unused:
                self._inner.skip(place)
        self._inner.finish()

    def settle(self) -> None:
        """See `Exchange`."""
        self._inner.settle()
        for matrix in self._matrices.values():
            if matrix.is_due:
                matrix.apply()

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`. The bytes of a tensor are those of its P and Q."""
        inner = self._inner.traffic()
        found = {i - self._first: traffic for i, traffic in inner.items() if i >= self._first}
        for index, matrix in self._matrices.items():
            parts = [inner[matrix.place + part] for part in range(3 if matrix.start else 2)]
            found[index] = Traffic(
                bytes_out=sum(part.bytes_out for part in parts),
                bytes_in=sum(part.bytes_in for part in parts),
                on_way_s=sum(part.on_way_s for part in parts),
                held_back=math.sqrt(sum_of_squares(matrix.held_back)),
            )
        return found

    def close(self) -> None:
        """See `Exchange`."""
        self._inner.close()


class LowRankState:
    """See `ExchangeState`.

    Args:
        inner: the state of the inner exchange.
        matrices: by the index of the tensor.
        first: the index of the first tensor in the inner exchange.
    """

    private = False

    def __init__(self, inner: ExchangeState, matrices: Mapping[int, LowRankMatrix], first: int) -> None:
        self._inner = inner
        self._matrices = matrices
        self._first = first
        self._held_back: Mapping[str, Array] = {}

    def histories(self) -> list[History]:
        """See `ExchangeState`."""
        found = self._inner.histories()[self._first :]
        for index, matrix in self._matrices.items():
            found[index] = [part.cpu().numpy().reshape(matrix.shape).copy() for part in matrix.history]
        return found

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        own = {
            f"{matrix.name}, history {number}": history
            for matrix in self._matrices.values()
            for number, history in enumerate(matrix.history)
        }
        return {**self._inner.replicated(), **own}

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        found = dict(self._inner.held_back())
        for matrix in self._matrices.values():
            for name, tensor in matrix.kept():
                found[name] = tensor.reshape(-1).cpu().numpy().copy()
        return found

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""
        for matrix in self._matrices.values():
            for name, tensor in matrix.kept():
                if name in held_back and held_back[name].size != tensor.numel():
                    raise SnapshotError(
                        f"the snapshot has {held_back[name].size} elements of {name}; expected {tensor.numel()}: "
                        "the rank of --compress=powersgd:RANK is another, or the module"
                    )
        self._inner.hold_back(held_back)
        self._held_back = held_back

    def restore(self, histories: Sequence[History] | None) -> None:
        """Continue from these histories, and from what `hold_back` was given
        since the last call; from zeros without.
        """
        for index, matrix in self._matrices.items():
            matrix.reset(histories[index] if histories else ())
            for name, tensor in matrix.kept():
                if name in self._held_back:
                    tensor.copy_(torch.from_numpy(self._held_back[name]).view(tensor.shape))
        self._held_back = {}
