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
        parts: how many parts of a tensor each worker of the host contributes; factors come as one.
    """

    def __init__(self, by_factors: Sequence[bool], parts: Sequence[int]) -> None:
        self._owed = {
            (index, False): [1] * len(parts) if is_by_factors else list(parts)
            for index, is_by_factors in enumerate(by_factors)
        }
        """By tensor, and whether it is for its release: how often each worker has to note it."""
        for index, is_by_factors in enumerate(by_factors):
            if is_by_factors:
                self._owed[index, True] = [1] * len(parts)
        self.start()

    def start(self) -> None:
        """Begin a new iteration."""
        self._left = {key: list(owed) for key, owed in self._owed.items()}

    def contribute(self, index: int, worker: int) -> bool:
        """Note that a worker has contributed its next part of a tensor; return whether it is the
        last of all.
        """
        return self._note((index, False), worker)

    def release(self, index: int, worker: int) -> bool:
        """Note that a worker has released a tensor; return whether it is the last."""
        return self._note((index, True), worker)

    def owes(self, worker: int) -> bool:
        """Return whether a contribution or release of a worker is missing."""
        return any(left[worker] for left in self._left.values())

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._left

    def _note(self, key: tuple[int, bool], worker: int) -> bool:
        left = self._left.get(key)
        assert left and left[worker], f"worker {worker} contributes too often"
        left[worker] -= 1
        if any(left):
            return False
        del self._left[key]
        return True


class FactorStack:
    """One tensor's factors of all workers of a host, in worker order.

    Args:
        outputs: N, the rows of the tensor.
        inputs: M, its columns.
        divisor: of u: the workers of the host, where their product is to be the mean gradient.
        device: where the factors are wanted.
    """

    def __init__(self, outputs: int, inputs: int, *, divisor: int, device: torch.device) -> None:
        self._divisor = divisor
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
        self._u_RN[rows].copy_(u_KN).div_(self._divisor)
        self._v_RM[rows].copy_(v_KM)

    def _grow(self, rows: int) -> None:
        if rows <= self._u_RN.shape[0]:
            return
        for name in ("_u_RN", "_v_RM"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(rows, old.shape[1])
            new[: self._own_rows] = old[: self._own_rows]
            setattr(self, name, new)
