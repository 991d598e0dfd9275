"""What the workers of a host have contributed to an iteration, tensor by tensor.

A state machine without I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Contributions:
    """Counts which worker has contributed to and released which tensor.

    Args:
        by_factors: for each tensor whether it travels as factors, which must be released too.
        workers: number of workers on the host.
    """

    def __init__(self, by_factors: Sequence[bool], workers: int) -> None:
        self._by_factors = by_factors
        self._everyone = frozenset(range(workers))
        self._contributed: list[set[int]] = []
        self._released: list[set[int]] = []
        self._left = 0
        self.start()

    def start(self) -> None:
        """Begin a new iteration."""
        self._contributed = [set() for _ in self._by_factors]
        self._released = [set() for _ in self._by_factors]
        self._left = len(self._by_factors) + sum(self._by_factors)

    def contribute(self, index: int, worker: int) -> bool:
        """Note that a worker has contributed its part of a tensor; return whether it is the
        last.
        """
        return self._note(self._contributed[index], worker)

    def release(self, index: int, worker: int) -> bool:
        """Note that a worker has released a tensor; return whether it is the last."""
        return self._note(self._released[index], worker)

    def owes(self, worker: int) -> bool:
        """Return whether a contribution or release of a worker is missing."""
        released = (
            done for done, needed in zip(self._released, self._by_factors, strict=True) if needed
        )
        return any(worker not in done for done in (*self._contributed, *released))

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self._left == 0

    def _note(self, done: set[int], worker: int) -> bool:
        assert worker not in done, f"worker {worker} contributes twice"
        done.add(worker)
        if done != self._everyone:
            return False
        self._left -= 1
        return True


class FactorStack:
    """One tensor's factors of all workers of a host, in worker order, such that their product is
    the mean gradient.

    Args:
        outputs: N, the rows of the tensor.
        inputs: M, its columns.
        workers: L, number of workers on the host; u is divided by it.
        device: where the factors are wanted.
    """

    def __init__(self, outputs: int, inputs: int, *, workers: int, device: torch.device) -> None:
        self._workers = workers
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._own_rows = 0
        self._u_RN = torch.empty(0, outputs, device=device, dtype=torch.float32)
        self._v_RM = torch.empty(0, inputs, device=device, dtype=torch.float32)

    def own(self, u_KN: Tensor, v_KM: Tensor) -> None:
        """Take the leader's factors, which are copied at once."""
        self._own_rows = 0
        self._grow(u_KN.shape[0])
        self._append(u_KN, v_KM, 0)
        self._own_rows = u_KN.shape[0]

    def add(self, worker: int, rows: int, packed: bytearray) -> None:
        """Take another worker's factors: `rows` rows of u, then of v, float32."""
        if rows == 0:
            return
        flat = torch.frombuffer(packed, dtype=torch.float32)
        width = self._u_RN.shape[1]
        self._parts[worker] = (
            flat[: rows * width].view(rows, width),
            flat[rows * width :].view(rows, -1),
        )

    def take(self) -> tuple[Tensor, Tensor]:
        """Return all factors, u (rows x N) and v (rows x M), in memory that is used again in the
        next iteration.
        """
        place = self._own_rows
        rows = place + sum(u.shape[0] for u, _ in self._parts.values())
        self._grow(rows)
        for worker in sorted(self._parts):
            u_KN, v_KM = self._parts[worker]
            self._append(u_KN, v_KM, place)
            place += u_KN.shape[0]
        self._parts.clear()
        self._own_rows = 0
        return self._u_RN[:rows], self._v_RM[:rows]

    def _append(self, u_KN: Tensor, v_KM: Tensor, place: int) -> None:
        rows = slice(place, place + u_KN.shape[0])
        self._u_RN[rows].copy_(u_KN).div_(self._workers)
        self._v_RM[rows].copy_(v_KM)

    def _grow(self, rows: int) -> None:
        if rows <= self._u_RN.shape[0]:
            return
        for name in ("_u_RN", "_v_RM"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(rows, old.shape[1])
            new[: self._own_rows] = old[: self._own_rows]
            setattr(self, name, new)
