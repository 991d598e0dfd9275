"""What the carriers of a leader and of a follower have in common: they contribute to the sums of
their host, and take each value once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from poseidon.exchange.base import Trained
from poseidon.exchange.carrier import FactoredCarrier, GradientCarrier, Step
from poseidon.exchange.turns import Factors


class HostCarrier(GradientCarrier, FactoredCarrier):
    """Counts what its worker has contributed to each tensor, and which value it has taken.

    A worker takes a value before it contributes to the tensor's next sum. Else it would overwrite
    its last part.
    """

    def __init__(self, tensors: Sequence[Trained]) -> None:
        self.indices = range(len(tensors))
        self._tensors = tensors
        self._round = 0  # publications of the values so far
        self._taken = [0] * len(tensors)
        self._begun: Counter[int] = Counter()  # of each tensor, contributed in this iteration
        self._released: set[int] = set()

    @abstractmethod
    def _take(self, index: int) -> None:
        """Wait for a tensor's value of this round."""

    @abstractmethod
    def _add(self, index: int, part: Tensor | None, number: int) -> None:
        """Contribute to a sum the part of a number, flat; None: zeros."""

    @abstractmethod
    def _add_factors(self, index: int, factors: Factors | None) -> None:
        """Contribute factors; None: no rows."""

    @abstractmethod
    def _add_release(self, index: int) -> None:
        """Note for the host that this worker's layer does not use a tensor any more."""

    def start(self, step: Step) -> None:
        self._begun.clear()
        self._released.clear()

    def begin(self, index: int, gradient: Tensor) -> None:
        self._contribute(index, gradient.detach().reshape(-1))

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self.wait(index)
        self._begun[index] += 1
        self._add_factors(index, (u_KN.detach(), v_KM.detach()))

    def release(self, index: int) -> None:
        if index not in self._released:
            self._released.add(index)
            self._add_release(index)

    def wait(self, index: int) -> None:
        if self._taken[index] != self._round:
            self._take(index)
            self._taken[index] = self._round

    def finish(self, limit: float) -> None:
        for index, trained in enumerate(self._tensors):
            self.wait(index)
            if index in self.by_factors:
                if not self._begun[index]:
                    self._add_factors(index, None)
                self.release(index)
            elif not self._begun[index]:
                value = trained.tensor.detach().reshape(-1)
                self._contribute(index, value if trained.statistics else None)
        self._round += 1

    def _contribute(self, index: int, part: Tensor | None) -> None:
        self.wait(index)
        self._add(index, part, self._begun[index])
        self._begun[index] += 1

    def _take_all(self) -> None:
        """Take every value of the last publication."""
        for index in self.indices:
            self.wait(index)
