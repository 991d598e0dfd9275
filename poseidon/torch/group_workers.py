"""The workers of a group, as a script sees them: who they are, what they are asked, and their
collectives.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from poseidon.engine.worker_context import Loop
from poseidon.errors import UsageError
from poseidon.exchange.broadcast import broadcast_bytes, gather_bytes
from poseidon.torch import plain_values
from poseidon.torch.group_loop import GroupLoop

Number = TypeVar("Number", float, Tensor)


class GroupWorkers:
    """All workers of a job, of which this process is one."""

    _loop: GroupLoop

    @property
    def rank(self) -> int:
        """The rank of this worker, 0..size-1."""
        return self._loop.context.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._loop.context.size

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._loop.context.device

    @property
    def virtual_worker(self) -> int:
        """The virtual worker whose turn it is, 0..virtual_workers-1; by default the rank."""
        return self._loop.virtual_worker

    @property
    def virtual_workers(self) -> int:
        """Number of virtual workers of the job; by default the number of workers."""
        return self._loop.tree.count

    @property
    def stopping(self) -> bool:
        """True once the job was asked to stop, after a step that all workers have reached together.
        A loop that continues regardless is ended by a KeyboardInterrupt in its next `step`.
        """
        return any(one.is_asked_to_stop() for one in self._loops)

    @property
    def snapshot_wanted(self) -> bool:
        """True if the job was asked, after this very step, to save its state."""
        return any(one.is_asked_for_snapshot() for one in self._loops)

    @property
    def _loops(self) -> list[Loop]:
        return [self._loop, *self._loop.context.loops.open]

    def mean(self, value: Number) -> Number:
        """Return the mean over all workers of a number or a small tensor. All workers call it
        together. The mean of a tensor of whole numbers is of float64.

        Raises:
            UsageError: the workers have not made as many steps, or not given as many numbers, or
                they are not real.
        """
        self._loop.check_open("mean")
        plain_values.check_number(value, "mean")
        if not isinstance(value, Tensor):
            number = torch.tensor(value, dtype=torch.float64, device="cpu")
            return float(self._loop.collections.mean(number))
        mean = torch.from_numpy(self._loop.collections.mean(value.detach())).to(value.device)
        return mean.to(value.dtype) if value.dtype.is_floating_point else mean

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers by rank, on every worker. All call it together.

        Args:
            value: tensors, numbers, strings, bytes, None, and lists, tuples and dicts of them; of
                any size, and different on each worker. Small ones are fast: they travel through
                one shard.

        Returns:
            The values, whose tensors are on the device of the first tensor of this worker's.

        Raises:
            UsageError: a part of the value has a different type.
        """
        return self._gather(value, "gather")

    def _gather(self, value: Any, call: str) -> list[Any]:
        with self._loop.collecting(call) as gather:
            parts = gather_bytes(plain_values.encode(value, call), gather, keeps=True)
        device = plain_values.device_of(value)
        return [plain_values.decode(part, rank, device) for rank, part in enumerate(parts)]

    def broadcast(self, value: Any = None, src: int = 0) -> Any:
        """Return the value of one worker on every worker. All call it together.

        Args:
            value: on the worker `src` as for `gather`; of others only the device of its first
                tensor counts.
            src: the rank of the worker whose value is returned.

        Raises:
            UsageError: a part of the value has a different type, or `src` is not a rank.
        """
        with self._loop.collecting("broadcast") as gather:
            if not 0 <= src < self.size:
                raise UsageError(f"broadcast() was given src={src}; expected 0 to {self.size - 1}")
            content = plain_values.encode(value, "broadcast") if self.rank == src else None
            shared = broadcast_bytes(content, gather, rank=self.rank, root=src)
        assert shared is not None
        return plain_values.decode(shared, src, plain_values.device_of(value))

    def all_reduce(self, value: Number, op: str = "sum") -> Number:
        """Return the sum over all workers of a number or a small tensor; the argument stays. All
        workers call it together. Sums are in the order of ranks, so all have the same bits.

        Args:
            value: of the same type and shape on every worker.
            op: `sum`, `mean`, `min` or `max`, element by element.

        Returns:
            A tensor of the same type; the mean of whole numbers is of float64.

        Raises:
            UsageError: the values do not fit each other or are not real, or `op` is unknown.
        """
        self._loop.check_open("all_reduce")
        how = plain_values.reduction(op)
        plain_values.check_number(value, "all_reduce")
        given: Any = value.detach() if isinstance(value, Tensor) else value
        given = given.item() if isinstance(given, np.generic) else given
        result: Any = plain_values.reduce(self._gather(given, "all_reduce"), how)
        return result  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Return once all workers have called it."""
        with self._loop.collecting("barrier") as gather:
            gather(b"")

    def log(self, **values: float | Tensor) -> None:
        """Log values of this worker for the job's curves, which show means over the workers.
        Workers need not call it together, and it does not wait. The values are of the step that is
        under way after its forward pass, else of the last one that has ended. Several values of one
        name and step are averaged. The value of a tensor on a GPU is copied while the script
        continues. A script that trains alone logs nothing. docs/torch_modules.md says what is
        shown where.

        Args:
            values: real numbers, or tensors of one element, such as `loss=loss`. `loss` and
                `learning_rate` have curves of their own. At most 100 names.

        Raises:
            UsageError: a name or a value cannot be logged.
        """
        self._loop.context.job.log(self._loop.session.last_step, values)
