"""`Group`: a module that all workers of a job train together.

It is the face of a loop (`group_loop.py`), of the data that each worker reads (`shared_data.py`)
and of its saved states (`group_checkpoints.py`). A `GroupUpdate` applies gradients (`updates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn
from torch.utils.data import Dataset

from poseidon.engine.loop_table import LoopEvent, State
from poseidon.errors import UsageError
from poseidon.torch.group_checkpoints import GroupCheckpoints
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.group_workers import GroupWorkers
from poseidon.torch.kept import Kept
from poseidon.torch.sampler import SharedSampler
from poseidon.torch.shared_data import SharedData, SharedLoader
from poseidon.torch.updates.group_update import GroupUpdate
from poseidon.torch.weights import Batch
from ps_server import ServerError

Self = TypeVar("Self", bound="Group")


class Group(GroupWorkers):
    """A module that all workers train together: steps, data, collectives and checkpoints."""

    def __init__(self, update: GroupUpdate) -> None:
        self._context = update.plan.context
        self._loop = loop = GroupLoop(update)
        try:
            update.attach(loop)
        except BaseException:
            loop.on(LoopEvent.CLOSE)
            raise
        self._checkpoints = GroupCheckpoints(loop)
        self._data = SharedData(loop, self._checkpoints.between_iterations)
        self._update = update

    @property
    def steps(self) -> int:
        """Steps finished; with a quorum of the workers, the job's: a late worker leaves out what
        the others have made without it.
        """
        return self._loop.session.steps

    @property
    def pending(self) -> int:
        """Backward passes since the last step, which `step` applies and `drop` discards."""
        return self._loop.session.passes

    @property
    def lr(self) -> float:
        """The learning rate of the current or the next step; the same on every worker. Of an
        optimizer it is the rate of the first parameter group.

        Under a rule it may be set between a step and the next forward pass. From then on it
        replaces the rule's own rate; the rate of Muon's `others` stays. The rates of an optimizer
        are set in its `param_groups`.
        """
        return self._update.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self._update.set_lr(rate)

    def step(self, *, zero_grad: bool = True) -> bool:
        """End the step, or the turn of a virtual worker within it.

        It applies the gradients of all backward passes since the last step, at most `passes=` of
        each virtual worker. Under a rule new parameters arrive while the next forward pass runs; a
        read waits for them. Under optimizers it calls their own `step`; a script may call those
        instead.

        Args:
            zero_grad: clear the gradients of the module afterwards. False: under a torch.optim
                optimizer they stay, as means over the workers, and the next pass adds to them.

        Returns:
            Whether the step has ended. If not, another virtual worker of this process is next, and
            parameters keep their values.

        Raises:
            UsageError: there was no backward pass, or gradients of a rule are to stay.
            KeyboardInterrupt: the job was asked to stop, and the loop has continued.
        """
        return self._update.step(zero_grad=zero_grad)

    def average_gradients(self) -> bool:
        """Set every `grad` to the mean over all workers now, for a loop that reads gradients
        before the optimizer does. With local steps it does nothing: a step uses the gradients of
        this worker.

        Returns:
            Whether they are the means. If not, another virtual worker of this process is next, and
            there are no gradients for the optimizer yet.

        Raises:
            UsageError: there was no backward pass; or a rule applies gradients; or there are
                tables, whose gradients leave with the optimizer's step.
        """
        return self._update.average_gradients()

    def drop(self) -> None:
        """Discard the backward passes since the last step, and their gradients. All workers do it
        alike, under a rule after fewer passes than `passes=`. Running statistics keep what these
        passes have changed.

        Raises:
            UsageError: the last pass of the step has ended under a rule, so the shards have its
                gradients.
        """
        if self._loop.session.passes:
            self._loop.forget_passes()
            self._loop.exchanged.hooks.clear()

    def settle(self) -> None:
        """Bring parameters and statistics to the state after all workers' steps: with staleness or
        local steps before evaluating or saving. All workers call it together.

        Raises:
            UsageError: a step is under way.
        """
        with self._loop.settled("settle"):
            pass

    def close(self) -> None:
        """Leave the job and remove the hooks from the module. Safe to call twice."""
        self._data.close()
        self._update.close()
        self._loop.on(LoopEvent.CLOSE)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise UsageError(
            "a group is not a module; call the module that distribute() was given: group = "
            "poseidon.distribute(model, ...), then model(x)"
        )

    def __enter__(self: Self) -> Self:
        self._context.loops.add(self._loop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.end_waits(error)
        try:
            if error is None and self._loop.session.state is not State.CLOSED:
                self._context.check_start()
                self._loop.leave()
        except ServerError as lost:
            self._context.end_waits(lost)
            raise
        finally:
            with self._context.closing(error), self._loop.collections.leaving(error):
                self.close()

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
        return self._data.sampler(dataset, shuffle, seed, batch_size=batch_size)

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
        """Return a DataLoader of this worker's records, whose position within an epoch is saved. For
        several virtual workers it yields the records of each in turn: in each iteration `passes`
        batches of the first, then of the next.

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
        return self._data.loader(dataset, batch_size, shuffle, seed, even=even, **arguments)

    def prefetch(self, module: nn.Module, indices: Tensor) -> None:
        """Request the rows that a table or sparse embedding looks up next, and return at once: a
        later forward pass with these indices finds them here. Before the forward pass of a step
        these are rows of this step, after it of the next one.

        Args:
            module: a `Table`, or an nn.Embedding or nn.EmbeddingBag with `sparse=True`.
            indices: int64 or int32, of any shape, as its forward pass gets them.

        Raises:
            UsageError: the module has no rows on the shards, or an index is out of range.
        """
        self._loop.check_open("prefetch")
        self._loop.exchanged.tables.prefetch(module, indices)

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
        return self._data.weigh(loss, records, of)

    def epoch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this worker's batches until the batches of all workers have ended. They may have
        different numbers of batches. One whose own have ended gets its last one again, whose loss
        `weigh` multiplies by 0. All iterate together; each waits for the others before each batch.

        Raises:
            UsageError: a worker has no batch, and another has.
        """
        return self._data.epoch(batches)

    def keep(self, **objects: Kept | Group) -> None:
        """Save and load these as well: a scheduler, a GradScaler, anything with `state_dict` and
        `load_state_dict`, and other groups. They are the same on all workers: rank 0's states are
        saved; of a group all workers' states are. Call it before `resume` or `load_state_dict`.

        Raises:
            UsageError: one has no state, or its name is taken.
        """
        of_groups = {n: o._checkpoints if isinstance(o, Group) else o for n, o in objects.items()}
        self._checkpoints.keep(of_groups)

    def keep_own(self, **objects: Kept) -> None:
        """Save and load these as well, each worker its own: a StatefulDataLoader, the position of
        a stream. Call it before `resume` or `load_state_dict`. Their states are of types that
        `torch.load(weights_only=True)` reads.

        Raises:
            UsageError: one has no state, or its name is taken, or a worker computes for several
                virtual workers.
        """
        self._checkpoints.keep_own(objects)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training can resume from, after a step. All workers call it
        together.

        It holds parameters and buffers, the rule's histories or the optimizer's state, the number
        of steps, the objects given to `keep`, and for each worker the positions of its samplers,
        its random states and its own buffers.

        Returns:
            On rank 0 the whole state, on the CPU, of types that `torch.load(weights_only=True)`
            reads; on others an empty dict.

        Raises:
            UsageError: a step is under way, or there are row tables, which only `save` writes.
        """
        return self._checkpoints.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume from a result of `state_dict`: rank 0's, on all workers. All call it together,
        before the first step.

        Raises:
            SnapshotError: it is of a different module, rule or optimizer, or has states of
                `keep_own` of a different number of workers.
            UsageError: a step has begun.
        """
        self._checkpoints.load_state_dict(state)

    def save(self, prefix: str | Path | None = None, *, keep: int = 2) -> Path:
        """Write a checkpoint of `state_dict` to `<prefix>_iter_<steps>.pt`, on rank 0's host. All
        workers call it together. When it has returned on rank 0, the file and its checksums are on
        disk. A job that is restarted resumes from it.

        Args:
            prefix: of its name; None: `checkpoint` in the job's folder, and for a script that
                trains alone `checkpoints/<script>` in the current folder.
            keep: how many with this prefix stay, the newest; 0: all.

        Returns:
            The path of the file.

        Raises:
            SnapshotError: it could not be written, or another job that runs writes with this
                prefix; earlier ones are untouched.
            UsageError: a step is under way, or `keep` is below 0.
        """
        return self._checkpoints.save(prefix, keep=keep)

    def resume(self, prefix: str | Path | None = None) -> bool:
        """Resume from the newest checkpoint. All workers call it together, before the first step.

        The checkpoint is the job's own newest one if the job was restarted; otherwise the one given
        by `--snapshot=` of `poseidon run`; otherwise the newest complete one with the prefix on
        rank 0's host.

        Args:
            prefix: the prefix given to `save`. None: a job without a checkpoint starts from the
                beginning; a script that trains alone takes what `save()` has written.

        Returns:
            True if there was a checkpoint; False on a fresh start.

        Raises:
            SnapshotError: as for `load_state_dict`, or the file is damaged.
            UsageError: a step has begun.
        """
        return self._checkpoints.resume(prefix)
