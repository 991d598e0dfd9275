"""`Group`: a module that all workers of a job train together.

`RuleGroup` and `OptimizerGroup` are its two kinds.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from poseidon.engine.broadcast import broadcast_bytes, gather_bytes
from poseidon.engine.module import plain_values
from poseidon.engine.module.checkpoint_file import (
    FORMAT,
    checked,
    checkpoint_path,
    newest_checkpoint,
    packed,
    prepare_checkpoint,
    read_checkpoint,
    unpacked,
    write_checkpoint,
)
from poseidon.engine.module.resized_state import resized
from poseidon.engine.module.sampler import SharedLoader, SharedSampler
from poseidon.engine.module.step_loop import StepLoop
from poseidon.engine.module.sync_norm import SyncNorms
from poseidon.engine.module.tensors import GroupPlan
from poseidon.engine.module.weights import Batch, BatchWeights
from poseidon.engine.module.worker_context import WorkerContext
from poseidon.engine.module.worker_state import Kept, WorkerState
from poseidon.engine.snapshot_writer import WrittenSnapshot
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.base import History
from poseidon.exchange.module_hooks import uncompiled
from ps_server.rules import history_count

Number = TypeVar("Number", float, Tensor)


class Group(StepLoop):
    """A module that all workers train together: steps, data, collections and checkpoints.

    Args:
        module: the module, or `torch.compile` of it.
        plan: the tensors to exchange.
        context: this worker.
    """

    def __init__(self, module: nn.Module, plan: GroupPlan, context: WorkerContext) -> None:
        self._own = WorkerState(uncompiled(module), plan.rest, context.worker.device)
        self._resume_from = context.checkpoint
        self._says_where = False
        self._weights = BatchWeights(context.worker.size)
        self._kept_groups: dict[str, Group] = {}
        self._norms: SyncNorms | None = None
        super().__init__(module, plan, context)
        self._norms = SyncNorms(self._module, self._gather_of_norm, lambda: self._weights.counts)

    def close(self) -> None:
        """See `StepLoop`."""
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
            UsageError: a part of the value has another type.
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
            UsageError: a part of the value has another type, or there is no such rank.
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

    def sampler(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0) -> SharedSampler:
        """Return a DataLoader's sampler of this worker's records of a dataset, in another order
        each epoch.

        Args:
            dataset: anything with a length, the same on every worker.
            shuffle: draw a random order for each epoch.
            seed: of the orders.
        """
        return self._sampler(dataset, shuffle, seed)

    def _sampler(
        self, dataset: Sized, shuffle: bool, seed: int, *, unfilled: int = 0
    ) -> SharedSampler:
        sampler = SharedSampler(
            dataset,
            rank=self.rank,
            workers=self.size,
            shuffle=shuffle,
            seed=seed,
            on_return=self._own.return_random,
            unfilled=unfilled,
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

        Its position within an epoch is saved exactly.

        Args:
            dataset: with records by number, the same on every worker.
            batch_size: records of a batch of this worker.
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
            on_batch=lambda records: self._weights.note(records, self.rank),
            **arguments,
        )

    def weigh(
        self, loss: Tensor, records: float | None = None, *, of: float | None = None
    ) -> Tensor:
        """Return a loss whose gradient has the weight of its records in the mean over all workers.

        A loss is the mean over this worker's n records. The mean gradient of a step is then
        sum(n g) / sum(n), that of one process with all records. Call `backward()` on the result.
        With `records` all workers call it together, once for each backward pass.

        Args:
            loss: the mean over the records.
            records: how many, or how many tokens; 0 or more, and with 0 the loss is finite. None:
                as many as `loader` has in this batch.
            of: this worker's records in all passes of the step, if it has several whose gradients
                add up; `loss` is then the mean over those of one pass. None: one pass.

        Raises:
            UsageError: a number is out of range or is needed; or gradients are not averaged in
                each step.
        """
        self._check_open("weigh")
        if self._context.member.options.staleness or self._local_steps:
            raise UsageError(
                "weigh() weighs gradients that are averaged in each step; expected "
                "--table_staleness=0 and no local steps"
            )
        with self._collections.calling("weigh"):
            return self._weights.weigh(loss, records, of, self._collections.gather)

    def epoch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this worker's batches until those of all workers have ended.

        The workers may have different numbers of batches. One whose own have ended gets its last
        one again, whose loss `weigh` multiplies by 0. All workers iterate together; each waits for
        the others before each batch.

        Raises:
            UsageError: a worker has no batch, and another has.
        """
        self._check_open("epoch")

        def gather(payload: bytes) -> Sequence[bytes]:
            with self._collections.calling("epoch"):
                return self._collections.gather(payload)

        return self._weights.until_all_end(batches, gather, self.rank)

    def _is_left_out(self) -> bool:
        return self._weights.is_left_out

    def _finish_iteration(self) -> None:
        super()._finish_iteration()
        self._weights.end_step()

    def _on_gradient(self, parameter: Tensor | None = None) -> None:
        if not self._in_backward:
            self._weights.check_weighed()
        super()._on_gradient(parameter)

    def keep(self, **objects: Kept | Group) -> None:
        """Save and load these as well: a scheduler, a GradScaler, anything with `state_dict` and
        `load_state_dict`, and other groups.

        They are the same on all workers: rank 0's states are saved. Of another group all workers'
        are. Call it before `resume` or `load_state_dict`.

        Raises:
            UsageError: one has no state, or its name is taken.
        """
        groups = {name: kept for name, kept in objects.items() if isinstance(kept, Group)}
        others = {name: kept for name, kept in objects.items() if not isinstance(kept, Group)}
        for name, group in groups.items():
            if group is self or name in self._kept_groups:
                raise UsageError(
                    f"keep() was given '{name}', which is this group itself or a name that is "
                    "taken; expected another group, under a name of its own"
                )
            if group._plan.tables:
                raise UsageError(
                    f"keep() was given '{name}', which has row tables, whose rows are in files of "
                    "their own; expected save(prefix) of that group"
                )
        self._own.keep(others)
        self._kept_groups.update(groups)

    def keep_own(self, **objects: Kept) -> None:
        """Save and load these as well, each worker its own: a StatefulDataLoader, the position of
        a stream.

        Call it before `resume` or `load_state_dict`. Their states are of types that
        `torch.load(weights_only=True)` reads.

        Raises:
            UsageError: one has no state, or its name is taken.
        """
        self._own.keep(objects, own=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training can resume from, after a step.

        All workers call it together.

        It holds parameters and buffers, the rule's histories or the optimizer's state, the number
        of steps, the objects given to `keep`, and for each worker the positions of its samplers,
        its random states and its own buffers.

        Returns:
            On rank 0 the whole state, on the CPU, of types that `torch.load(weights_only=True)`
            reads; on others an empty dict.

        Raises:
            UsageError: a step is under way, or there are row tables, which only `save` writes.
        """
        if self._plan.tables:
            raise UsageError(
                f"state_dict() with table '{self._plan.tables[0].spec.name}', whose rows are on "
                "the shards; expected save() and resume()"
            )
        return self._state("state_dict")

    def _state(self, call: str) -> dict[str, Any]:
        """Return `state_dict`. Other workers are waited for under the name of the call."""
        self._check_open(call)
        if self._passes or self._in_backward:
            raise UsageError(
                f"{call}() stands between a backward pass and its step(); expected after step()"
            )
        with self._collections.calling(call):
            self._settle(f"{call}()")
            first = self._collections.gather(self._own.digests())[0]
            self._check.run(self.steps)
            own = {**self._own.own(first, rank=self.rank), **self._save_own(), **self._held_back()}
            parts = gather_bytes(packed(own), self._collections.gather, keeps=self.rank == 0)
        groups = {}
        for name, group in self._kept_groups.items():
            group._forget_stale()
            groups[name] = group._state(call)
        if self.rank:
            return {}
        return {
            "poseidon": FORMAT,
            "steps": self.steps,
            "iterations": self._collections.iterations,
            "workers": self.size,
            "how": self._how,
            "exchange_plan": self._recorded.to_json() if self._recorded is not None else "",
            **self._own.shared(),
            "masters": self._masters.state(),
            **self._save_how(),
            "tables": self._tables.clocks(),
            **({"groups": groups} if groups else {}),
            "own": [
                unpacked(part, f"the state of worker {rank}") for rank, part in enumerate(parts)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume from a result of `state_dict`.

        All workers call it together, before the first step.

        Rank 0's argument is loaded on all workers; the arguments of others are ignored.

        Raises:
            SnapshotError: it is of another module, rule or optimizer, or has states of
                `keep_own` of another number of workers.
            UsageError: a step has begun.
        """
        content = packed(state) if self.rank == 0 and state is not None else None
        self._load("load_state_dict", content, "what load_state_dict() was given")

    def save(self, prefix: str | Path | None = None, *, keep: int = 2) -> Path:
        """Write a checkpoint of `state_dict` to `<prefix>_iter_<steps>.pt`, on rank
        0's host. All workers call it together.

        When it has returned on rank 0, the file and its checksums are on disk. A job that is
        restarted resumes from it.

        Args:
            prefix: of its name; None: `checkpoint` in the job's folder, and for a script that
                trains alone `checkpoints/<script>` in the current folder.
            keep: how many with this prefix stay, the newest; 0: all.

        Returns:
            The path of the file.

        Raises:
            SnapshotError: it could not be written; earlier ones are untouched.
            UsageError: a step is under way, or `keep` is below 0.
        """
        if keep < 0:
            raise UsageError(
                f"save() was given keep={keep}; expected a number of checkpoints, or 0 for all"
            )
        if prefix is None:
            self._check_first("save")
            prefix = self._context.prefix
            if self._context.folder is None and not self._says_where:
                self._says_where = True
                self._context.say(f"checkpoints go to {checkpoint_path(prefix, '<steps>')}")
        prefix = Path(prefix).absolute()
        began_s = time.monotonic()
        state = self._state("save")
        path = checkpoint_path(prefix, self.steps)
        if self.rank == 0:
            prepare_checkpoint(path)
            write_checkpoint(path, packed(state), keep, self._tables.write(path))
            seconds = time.monotonic() - began_s
            if self._context.number == 0:
                self._context.on_saved(
                    WrittenSnapshot(state=path, iteration=self.steps, seconds=seconds)
                )
        return path

    def resume(self, prefix: str | Path | None = None) -> bool:
        """Resume from the newest checkpoint. All workers call it together, before the first step.

        The checkpoint is the job's own newest one if the job was restarted; otherwise that of
        `--snapshot=` of `poseidon run`; otherwise the newest complete one with the prefix on rank
        0's host.

        Args:
            prefix: the prefix given to `save`. None: a job without a checkpoint starts from the
                beginning; a script that trains alone takes what `save()` has written.

        Returns:
            True if there was a checkpoint; False on a fresh start.

        Raises:
            SnapshotError: as for `load_state_dict`, or the file is damaged.
            UsageError: a step has begun.
        """
        if prefix is None:
            self._check_first("resume")
        path = self._resume_from if self._context.number == 0 else None
        if prefix is None and self._context.folder is None:
            prefix = self._context.prefix
        if path is None and prefix is not None and self.rank == 0:
            path = newest_checkpoint(Path(prefix).absolute())
        content = read_checkpoint(path) if self.rank == 0 and path is not None else None
        source = str(path or "the checkpoint")
        if not self._load("resume", content, source, needed=False, path=path):
            if self._context.number:
                self._resume_from = None
            return False
        if self.rank == 0:
            self._context.say(f"resuming from {path} at step {self.steps}")
        return True

    def _load(
        self,
        call: str,
        content: bytes | None,
        source: str,
        *,
        needed: bool = True,
        path: Path | None = None,
    ) -> bool:
        """Load rank 0's bytes on all workers. Return False if rank 0 has none.

        The rows of tables are beside `path`.
        """
        self._check_open(call)
        self._check_not_begun()
        with self._collections.calling(call):
            shared = broadcast_bytes(content, self._collections.gather, rank=self.rank)
        if shared is None:
            if needed:
                raise UsageError("load_state_dict() was given nothing on rank 0")
            return False
        state = checked(unpacked(shared, source), source)
        self._restore(state, source, call, has_files=call == "resume", path=path)
        return True

    def _check_first(self, call: str) -> None:
        """Refuse a checkpoint without a name that is not of the job's first group."""
        if self._context.number:
            raise UsageError(
                f"{call}() of another group than the job's first: its checkpoints are the first "
                f"group's, which expects first.keep(NAME=this) and first.{call}(); or give "
                f"{call}() a prefix of its own"
            )

    def _check_not_begun(self) -> None:
        if self.steps or self._begun:
            raise UsageError(
                "a state is loaded before the first step, and this group has begun step "
                f"{self.steps + 1}; expected "
                "resume() or load_state_dict() right after distribute()"
            )

    def _restore(
        self,
        state: Mapping[str, Any],
        source: str,
        call: str,
        *,
        has_files: bool = False,
        path: Path | None = None,
    ) -> None:
        """Load a state that all workers have.

        Args:
            state: the state.
            source: its origin, for messages.
            call: the script's call.
            has_files: whether the rows of tables are beside a file.
            path: the file, on rank 0.
        """
        groups = state.get("groups", {})
        if groups.keys() != self._kept_groups.keys():
            names = [", ".join(sorted(part)) or "none" for part in (groups, self._kept_groups)]
            raise SnapshotError(
                f"{source} has the groups {names[0]}; this script has handed {names[1]} to keep()"
            )
        self._check_how(state, source)
        if state["workers"] != self.size:
            if self.rank == 0:
                self._context.say(
                    f"{source} is of {state['workers']} worker(s), and this job has {self.size}: "
                    "random states are those that the script has set"
                )
            state = resized(state, self.size, source)
        self._tables.check(state.get("tables", {}), source, has_files=has_files)
        self._own.load_tensors(state, rank=self.rank)
        for own in (
            *state["own"],
            state["own"][self.rank],
        ):  # all workers refuse what does not fit one of them
            held_back = own.get("held_back", {})
            self._exchange.state.hold_back(
                {name: tensor.numpy() for name, tensor in held_back.items()}
            )
        self._masters.load(state.get("masters", {}))
        self._load_how(state)
        self._masters.publish_all()
        self._tables.load(state.get("tables", {}), path if self.rank == 0 else None)
        if self._plan.tables and self.size > 1:
            with self._collections.calling(call):
                self._collections.gather(b"")  # the shards have the rows
        self._collections.steps = state["steps"]
        self._collections.iterations = state["iterations"]
        self._settled = True
        self._resume_from = None
        self._own.load_rest(state, rank=self.rank)
        for name, group in self._kept_groups.items():
            group._check_not_begun()
            group._restore(checked(groups[name], source), f"'{name}' of {source}", call)

    def _held_back(self) -> dict[str, Any]:
        """Return what lossy codecs have held back on this worker; nothing without codecs."""
        held_back = self._exchange.state.held_back()
        return (
            {"held_back": {n: torch.tensor(a) for n, a in held_back.items()}} if held_back else {}
        )

    def _check_how(self, state: Mapping[str, Any], source: str) -> None:
        if state["how"] != self._how:
            raise SnapshotError(
                f"{source} was trained with {state['how']}, and this script gives distribute() "
                f"{self._how}"
            )

    def _begin(self) -> None:
        if self._resume_from is not None:
            kept = "first.keep(NAME=this) and first" if self._context.number else "group"
            raise UsageError(
                f"the job goes on from {self._resume_from}, and the script has begun a step "
                f"without it; expected {kept}.resume() before the first step"
            )
        super()._begin()

    def _split_histories(
        self,
    ) -> tuple[dict[str, list[Tensor]], dict[str, dict[str, list[Tensor]]]]:
        """Return the histories of the parameters by name, and those of the outer rule as an
        entry of a checkpoint.
        """
        own: dict[str, list[Tensor]] = {}
        outer: dict[str, list[Tensor]] = {}
        for trained, history in zip(
            self._plan.tensors, self._exchange.state.histories(), strict=True
        ):
            count = history_count(trained.rule.kind)
            arrays = [torch.tensor(array) for array in history]
            if not trained.statistics:
                own[trained.name] = arrays[:count]
                outer[trained.name] = arrays[count:]
        return own, {"outer": outer} if any(outer.values()) else {}

    def _with_outer(self, histories: Sequence[History], state: Mapping[str, Any]) -> list[History]:
        """Return histories with those of the outer rule in a checkpoint, which all
        workers share: worker 0 has saved them.

        Raises:
            SnapshotError: they do not fit a parameter.
        """
        outer = state["own"][0].get("outer")
        if outer is None or not self._local_steps:
            return list(histories)
        count = max(map(len, outer.values()), default=0)
        found: list[History] = []
        for trained, own in zip(self._plan.tensors, histories, strict=True):
            shape = trained.tensor.shape
            arrays = (
                [torch.zeros(shape)] * count if trained.statistics else outer.get(trained.name, [])
            )
            if len(arrays) != count or any(array.shape != shape for array in arrays):
                raise SnapshotError(
                    f"the checkpoint has no outer history that fits '{trained.name}'"
                )
            found.append([*own, *(array.numpy() for array in arrays)])
        return found

    @property
    @abstractmethod
    def _how(self) -> str:
        """The name of the rule or optimizer."""

    @abstractmethod
    def _save_how(self) -> dict[str, Any]:
        """Return the state of the rule or optimizer that all workers share; called on rank 0."""

    def _save_own(self) -> dict[str, Any]:
        """Return the state of the rule that is this worker's own."""
        return {}

    @abstractmethod
    def _load_how(self, state: Mapping[str, Any]) -> None:
        """Load these states, and open the exchange again with the module's tensors, which are
        loaded.
        """
