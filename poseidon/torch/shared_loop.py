"""What all workers of a group do together besides steps: collections of values, the records that
each reads, and the weights of their batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from poseidon.errors import UsageError
from poseidon.exchange.broadcast import broadcast_bytes, gather_bytes
from poseidon.torch import plain_values
from poseidon.torch.loader import SharedLoader
from poseidon.torch.sampler import SharedSampler
from poseidon.torch.step_loop import StepLoop
from poseidon.torch.sync_norm import SyncNorms
from poseidon.torch.tensors import GroupPlan
from poseidon.torch.weights import Batch, BatchWeights
from poseidon.torch.worker_context import WorkerContext
from poseidon.torch.worker_state import WorkerState

Number = TypeVar("Number", float, Tensor)
SEVERAL = "and a worker of this job computes for several virtual workers, one after the other"


class SharedLoop(StepLoop):
    """The steps of a module, with collections and data."""

    def __init__(self, module: nn.Module, plan: GroupPlan, context: WorkerContext) -> None:
        self._norms: SyncNorms | None = None
        if context.member.options.quorum and any(
            isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()
        ):
            raise UsageError(
                "torch.nn.SyncBatchNorm normalizes over all workers in each forward pass, and with "
                f"a quorum of {context.member.options.quorum} they do not wait for each other; "
                "expected BatchNorm, or no quorum"
            )
        super().__init__(module, plan, context)
        self._own = WorkerState(self._module, plan.rest, context.worker.device, self._turns)
        self._weights = BatchWeights(self._turns.count)
        self._norms = SyncNorms(self._module, self._gather_of_norm, lambda: self._weights.counts)

    def close(self) -> None:
        if self._norms is not None:
            self._norms.close()
        super().close()

    def _gather_of_norm(self, payload: bytes) -> Sequence[bytes]:
        with self._collections.calling("SyncBatchNorm"):
            return self._collections.gather(payload)

    def mean(self, value: Number) -> Number:
        """Return the mean over all workers of a number or a small tensor.

        All workers call it together.

        The mean of a tensor of whole numbers is of float64.

        Raises:
            UsageError: the workers have not made as many steps, or not given as many numbers.
        """
        self._check_open("mean")
        numbers = (
            value
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=torch.float64, device="cpu")
        )
        tensor = numbers.detach()
        mean = self._collections.mean(tensor)
        if isinstance(value, Tensor):
            result = torch.from_numpy(mean).to(tensor.device)
            return result.to(tensor.dtype) if tensor.dtype.is_floating_point else result
        return float(mean)

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
        self._check_open("gather")
        with self._collections.calling("gather"):
            return self._gather(value, "gather")

    def _gather(self, value: Any, call: str) -> list[Any]:
        content = plain_values.encode(value, call)
        parts = gather_bytes(content, self._collections.gather, keeps=True)
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
        self._check_open("broadcast")
        if not 0 <= src < self.size:
            raise UsageError(f"broadcast() was given src={src}; expected 0 to {self.size - 1}")
        content = plain_values.encode(value, "broadcast") if self.rank == src else None
        with self._collections.calling("broadcast"):
            shared = broadcast_bytes(content, self._collections.gather, rank=self.rank, root=src)
        assert shared is not None
        return plain_values.decode(shared, src, plain_values.device_of(value))

    def all_reduce(self, value: Number, op: str = "sum") -> Number:
        """Return the sum over all workers of a number or a small tensor; the argument stays.

        All workers call it together. Sums are in the order of ranks, so all have the same bits.

        Args:
            value: of the same type and shape on every worker.
            op: `sum`, `mean`, `min` or `max`, element by element.

        Returns:
            A tensor of the same type; the mean of whole numbers is of float64.

        Raises:
            UsageError: the values do not fit each other, or there is no such op.
        """
        self._check_open("all_reduce")
        how = plain_values.reduction(op)
        given = value.detach() if isinstance(value, Tensor) else value
        with self._collections.calling("all_reduce"):
            result: Any = plain_values.reduce(self._gather(given, "all_reduce"), how)
        return result  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Return once all workers have called it."""
        self._check_open("barrier")
        with self._collections.calling("barrier"):
            self._collections.gather(b"")

    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, batch_size: int = 0
    ) -> SharedSampler:
        """Return a DataLoader's sampler of this worker's records of a dataset, in a different order
        each epoch.

        Args:
            dataset: anything with a length, the same on every worker.
            shuffle: draw a random order for each epoch.
            seed: of the orders.
            batch_size: of the DataLoader, which is needed if a worker computes for several virtual
                workers. All have whole batches then: more records come twice.

        Raises:
            UsageError: the batch size is needed.
        """
        if self._turns.several and not batch_size:
            raise UsageError(
                f"sampler() has no batch_size, {SEVERAL}, each with batches of its own; expected "
                "sampler(dataset, batch_size=...) as the DataLoader has it, or loader()"
            )
        return self._sampler(dataset, shuffle, seed, turn=batch_size * self._plan.passes)

    def _sampler(
        self, dataset: Sized, shuffle: bool, seed: int, *, unfilled: int = 0, turn: int = 0
    ) -> SharedSampler:
        streams = self._turns.streams
        sampler = SharedSampler(
            dataset,
            own=self._turns.own,
            workers=self._turns.count,
            shuffle=shuffle,
            seed=seed,
            on_read=(lambda _: None) if streams is None else streams.begin_reading,
            on_return=self._own.return_random,
            unfilled=unfilled,
            turn=turn,
        )
        self._own.add(sampler)
        return sampler

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        even: bool = True,
        **arguments: Any,
    ) -> SharedLoader:
        """Return a DataLoader of this worker's records.

        Its position within an epoch is saved exactly. For several virtual workers it yields the
        records of each in turn: in each iteration `passes` batches of the first, then of the next.

        Args:
            dataset: with records by number, the same on every worker.
            batch_size: records of a batch of one virtual worker.
            shuffle: draw a random order for each epoch.
            seed: of the orders.
            even: give all workers equally many records: some come twice in an epoch. False: each
                record comes once; the last batches are shorter, so `weigh` the losses.
            arguments: DataLoader's others, as `num_workers`.

        Raises:
            UsageError: an argument does not fit the others.
        """
        if not even and arguments.get("drop_last"):
            raise UsageError(
                "loader() was given even=False, with which each record comes once in an epoch, and "
                "drop_last=True; expected one of them"
            )
        records: Any = dataset  # a Dataset need not say that it has a length
        sampler = self._sampler(records, shuffle, seed, unfilled=0 if even else batch_size)
        return SharedLoader(
            dataset,
            sampler,
            batch_size,
            passes=self._plan.passes,
            weights=self._weights,
            streams=lambda: self._turns.streams,
            between=self._between_iterations,
            left_out=lambda: self._collections.left_out,
            **arguments,
        )

    def prefetch(self, module: nn.Module, indices: Tensor) -> None:
        """Request the rows that a table or sparse embedding looks up next, and return at once: a
        later forward pass with these indices finds them here.

        Before the forward pass of a step it requests rows of this step, after it of the next one.

        Args:
            module: a `Table`, or an nn.Embedding or nn.EmbeddingBag with `sparse=True`.
            indices: int64 or int32, of any shape, as its forward pass gets them.

        Raises:
            UsageError: the module has no rows on the shards, or an index is out of range.
        """
        self._check_open("prefetch")
        self._tables.prefetch(module, indices)

    def weigh(
        self, loss: Tensor, records: float | None = None, *, of: float | None = None
    ) -> Tensor:
        """Return a loss whose gradient has the weight of its records in the mean over all workers.

        A loss is the mean over the n records of this batch. The mean gradient of a step is then
        sum(n g) / sum(n), as in one process with all records. Call `backward()` on the result.
        With `records` all workers call it together, once for each backward pass.

        Args:
            loss: the mean over the records.
            records: how many, or how many tokens; 0 or more, and with 0 the loss is finite. None:
                as many as `loader` has in this batch.
            of: this worker's records in all passes of the step, if it has several whose gradients
                add up; `loss` is then the mean over the records of one pass. None: one pass.

        Raises:
            UsageError: a number is out of range or is needed; or gradients are not averaged in
                each step.
        """
        self._check_open("weigh")
        if self._context.member.options.staleness or self._local_steps:
            raise UsageError(
                "weigh() weighs gradients that are averaged in each step; expected "
                "--staleness=0 and no local steps"
            )
        if records is not None and self._turns.several:
            raise UsageError(
                f"weigh() was given the records of a batch, {SEVERAL}, so that not all have read "
                "theirs yet; expected weigh(loss), with batches of group.loader()"
            )
        with self._collections.calling("weigh"):
            return self._weights.weigh(loss, records, of, self._collections.gather)

    def epoch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this worker's batches until the batches of all workers have ended.

        The workers may have different numbers of batches. One whose own have ended gets its last
        one again, whose loss `weigh` multiplies by 0. All workers iterate together; each waits for
        the others before each batch.

        Raises:
            UsageError: a worker has no batch, and another has.
        """
        self._check_open("epoch")
        if self._turns.several:
            raise UsageError(
                f"epoch() waits for the other workers before each batch, {SEVERAL}; expected "
                "batches of group.loader(), of which each has equally many"
            )

        def gather(payload: bytes) -> Sequence[bytes]:
            with self._collections.calling("epoch"):
                return self._collections.gather(payload)

        return self._weights.until_all_end(batches, gather, self.rank)

    def _between_iterations(self) -> None:
        """Do what belongs between two iterations of the loop of a loader."""

    def _is_left_out(self) -> bool:
        return self._weights.is_left_out

    def _finish_iteration(self) -> None:
        if self._weights.records is not None:
            self._exchange.note_records(self._weights.records)
        super()._finish_iteration()

    def _end_turn(self) -> None:
        super()._end_turn()
        self._weights.end_step()

    def _on_gradient(self, parameter: Tensor | None = None) -> None:
        if not self._in_backward:
            self._weights.check_weighed()
        super()._on_gradient(parameter)
