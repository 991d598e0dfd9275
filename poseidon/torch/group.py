"""`Group`: a module that all workers of a job train together.

`RuleGroup` and `OptimizerGroup` are its two kinds.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from poseidon.engine.snapshots.checksums import NO_RUN, Run
from poseidon.engine.snapshots.files import make_folder
from poseidon.engine.snapshots.rotation import CHECKPOINT, later_of_others
from poseidon.engine.snapshots.runs import Prefixes
from poseidon.engine.snapshots.writer import WrittenSnapshot
from poseidon.errors import SnapshotError, UsageError, counted
from poseidon.exchange.base import History
from poseidon.exchange.broadcast import broadcast_bytes, gather_bytes
from poseidon.torch.checkpoint_file import (
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
from poseidon.torch.memory import ScriptMemory
from poseidon.torch.resized_state import resized
from poseidon.torch.sent_gradients import SentGradients
from poseidon.torch.shared_loop import SEVERAL, SharedLoop
from poseidon.torch.tensors import GroupPlan
from poseidon.torch.worker_context import WorkerContext
from poseidon.torch.worker_state import Kept
from ps_server.rules import history_count


class Group(SharedLoop):
    """A module that all workers train together: steps, data, collections and checkpoints."""

    _sent: SentGradients
    """The gradients of this step; each kind of group has a refusal of its own."""

    def __init__(self, module: nn.Module, plan: GroupPlan, context: WorkerContext) -> None:
        self._resume_from = context.checkpoint
        self._resumed: Path | None = None
        """The checkpoint that this group has resumed from, on rank 0."""
        self._told: set[Path] = set()
        """Prefixes whose earlier runs were named."""
        self._says_where = False
        self._kept_groups: dict[str, Group] = {}
        super().__init__(module, plan, context)

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
            UsageError: one has no state, or its name is taken, or a worker computes for several
                virtual workers.
        """
        if self._turns.several:
            raise UsageError(
                f"keep_own() has a state for each worker, {SEVERAL}; expected as many workers as "
                "virtual workers, or keep() for what is the same on all"
            )
        self._own.keep(objects, own=True)

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
        self._context.log(self._last_step, values)

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

    def _state(self, call: str, *, keeps: bool | None = None) -> dict[str, Any]:
        """Return `state_dict`. Other workers are waited for under the name of the call.

        Args:
            keeps: whether this worker gets the whole state; None: rank 0 does.
        """
        keeps = self.rank == 0 if keeps is None else keeps
        self._check_open(call)
        self._check_between(call)
        with self._collections.calling(call):
            self._settle(f"{call}()")
            first = self._collections.gather(self._own.digests())[0]
            self._check.run(self.steps)
            own = [
                {**state, **more}
                for state, more in zip(self._own.own(first), self._save_own(), strict=True)
            ]
            own[0] |= self._held_back()  # of all its virtual workers, by name
            parts = gather_bytes(packed(own), self._collections.gather, keeps=keeps)
        groups = {}
        for name, group in self._kept_groups.items():
            group._forget_stale()
            groups[name] = group._state(call, keeps=keeps)
        if not keeps:
            return {}
        own = [
            one
            for rank, part in enumerate(parts)
            for one in unpacked(part, f"the state of worker {rank}")
        ]
        masters = self._masters.from_shards(own[0].get("held_back", {}))
        return {
            "poseidon": FORMAT,
            "steps": self.steps,
            "iterations": self._collections.iterations,
            "workers": self.virtual_workers,
            "told": self._context.member.virtual_workers is not None,
            "how": self._how,
            "exchange_plan": self._recorded.to_json() if self._recorded is not None else "",
            **self._own.shared(),
            "masters": {**self._masters.state(), **masters},
            **self._save_how(),
            "tables": self._tables.clocks(),
            **({"groups": groups} if groups else {}),
            "own": own,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume from a result of `state_dict`.

        All workers call it together, before the first step.

        Rank 0's argument is loaded on all workers; the arguments of others are ignored.

        Raises:
            SnapshotError: it is of a different module, rule or optimizer, or has states of
                `keep_own` of a different number of workers.
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
            SnapshotError: it could not be written, or another job that runs writes with this
                prefix; earlier ones are untouched.
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
        run = self._run(prefix) if self.rank == 0 else NO_RUN
        state = self._state("save")
        path = checkpoint_path(prefix, self.steps)
        if self.rank == 0:
            prepare_checkpoint(path)
            write_checkpoint(path, packed(state), keep, self._tables.write(path), run)
            seconds = time.monotonic() - began_s
            if self._context.number == 0:
                self._context.on_saved(
                    WrittenSnapshot(state=path, iteration=self.steps, seconds=seconds)
                )
        return path

    def _run(self, prefix: Path) -> Run:
        """Return the run that checkpoints with a prefix belong to.

        Raises:
            SnapshotError: another job writes them.
        """
        loops = self._context.loops
        if loops.prefixes is None:
            loops.prefixes = Prefixes(self._context.job)
        make_folder(prefix.parent)
        begun = loops.prefixes.take(prefix, CHECKPOINT, self._resumed)
        if begun.beside is not None and prefix not in self._told:
            self._told.add(prefix)
            self._context.say(
                f"{begun.beside} is of an earlier run, which this run does not continue: it stays, "
                "checkpoints with the same numbers are replaced, and resume() takes this run's"
            )
        return begun.run

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
        if prefix is None:
            self._check_first("resume")
        memory = self._memory
        if memory is not None:
            memory.resumes = True
            if memory.rewinds:
                return self._resume_from_memory(memory)
        path = self._resume_from if self._context.number == 0 else None
        if prefix is None and self._context.folder is None:
            prefix = self._context.prefix
        if path is None and prefix is not None and self.rank == 0:
            path = newest_checkpoint(Path(prefix).absolute())
            other = None if path is None else later_of_others(path)
            if other is not None:
                self._context.say(f"{other} is of an earlier run than {path}, or damaged")
        content = read_checkpoint(path) if self.rank == 0 and path is not None else None
        source = str(path or "the checkpoint")
        if not self._load("resume", content, source, needed=False, path=path):
            if self._context.number:
                self._resume_from = None
            return False
        if self.rank == 0:
            self._resumed = path
            self._context.say(f"resuming from {path} at step {self.steps}")
        return True

    @property
    def _memory(self) -> ScriptMemory | None:
        """The job's memory snapshots, which hold the state of its first group."""
        return self._context.memory if self._context.number == 0 else None

    def _resume_from_memory(self, memory: ScriptMemory) -> bool:
        newest = memory.newest
        content = newest.content if self.rank == 0 and newest is not None else None
        return self._load("resume", content, "the memory snapshot")

    def _between_iterations(self) -> None:
        memory, iterations = self._memory, self._collections.iterations
        if memory is None or not memory.enters(iterations) or not self._is_whole(iterations):
            return
        with self._collections.calling("loader"):
            memory.between(
                lambda: packed(self._state("loader", keeps=memory.holds)),
                self._collections.gather,
                regroups=self._exchange.control.is_asked_to_regroup(iterations),
            )

    def _is_whole(self, iterations: int) -> bool:
        """Return whether the state of this group and of those given to `keep` is all that the
        job trains, after a step that ends a round of local steps, if it has them.
        """
        groups = [self, *self._kept_groups.values()]
        options = self._context.member.options
        return (
            len(self._context.loops.open) <= len(groups)
            and not self._passes
            and not self._plan.tables
            and not (options.staleness or options.streams)
            and iterations % max(1, self._local_steps) == 0
        )

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
                f"only the job's first group has checkpoints without a prefix; call "
                f"first.keep(NAME=this) and first.{call}(), or give {call}() a prefix"
            )

    def _check_not_begun(self) -> None:
        if self.steps or self._begun:
            raise UsageError(
                "a state is loaded before the first step, and this group has begun step "
                f"{self.steps + 1}; expected resume() or load_state_dict() right after distribute()"
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
        if state["workers"] != self.virtual_workers:
            state = self._resized(state, source)
        self._tables.check(state.get("tables", {}), source, has_files=has_files)
        self._own.load_tensors(state)
        masters = state.get("masters", {})
        self._hold_back(state["own"], self._masters.for_shards(masters))
        self._masters.load(masters)
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
        self._own.load_rest(state)
        for name, group in self._kept_groups.items():
            group._check_not_begun()
            group._restore(checked(groups[name], source), f"'{name}' of {source}", call)

    def _resized(self, state: Mapping[str, Any], source: str) -> dict[str, Any]:
        saved, own = state["workers"], self.virtual_workers
        if self.rank == 0:
            self._context.say(
                f"{source} is of {counted(saved, 'worker')}, and this job has {own}: random states "
                f"start from the seed; virtual_workers={saved} continues with the same bits"
            )
        return resized(state, own, source)

    def _held_back(self) -> dict[str, Any]:
        """Return what lossy codecs have held back on this worker; nothing without codecs."""
        held_back = self._exchange.state.held_back()
        return (
            {"held_back": {n: torch.tensor(a) for n, a in held_back.items()}} if held_back else {}
        )

    def _hold_back(
        self, owners: Sequence[Mapping[str, Any]], masters: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """Go on with what lossy codecs have held back: of this process, and of virtual workers
        that had another process. The shards continue with masters.
        """
        of_each = [
            {name: tensor.numpy() for name, tensor in one.get("held_back", {}).items()}
            for one in owners
        ]
        mine = {name: array for one in of_each for name, array in one.items()}
        mine |= {**of_each[self._turns.own[0]], **masters}
        for held_back in (*of_each, mine):  # all workers refuse what does not fit one of them
            self._exchange.state.hold_back(held_back)

    def _check_how(self, state: Mapping[str, Any], source: str) -> None:
        if state["how"] != self._how:
            raise SnapshotError(
                f"{source} was trained with {state['how']}, and this script gives distribute() "
                f"{self._how}"
            )

    def _forget_passes(self) -> None:
        super()._forget_passes()
        self._sent.forget()

    def _begin(self) -> None:
        if self._resume_from is not None:
            kept = "first.keep(NAME=this) and first" if self._context.number else "group"
            raise UsageError(
                f"the job continues from {self._resume_from}, and the script has begun a step "
                f"without it; expected {kept}.resume() before the first step"
            )
        super()._begin()

    def _split_histories(
        self,
    ) -> tuple[list[dict[str, list[Tensor]]], dict[str, dict[str, list[Tensor]]]]:
        """Return the histories of the parameters by name, of each virtual worker of this process
        that has one of its own, and the outer rule's histories as an entry of a checkpoint.
        """
        workers = len(self._turns.own) if self._exchange.state.private else 1
        own: list[dict[str, list[Tensor]]] = [{} for _ in range(workers)]
        outer: dict[str, list[Tensor]] = {}
        for trained, history in zip(
            self._plan.tensors, self._exchange.state.histories().values(), strict=True
        ):
            count = history_count(trained.rule.kind)
            arrays = [torch.tensor(array) for array in history]
            if not trained.statistics:
                for at, histories in enumerate(own):
                    histories[trained.name] = arrays[count * at : count * (at + 1)]
                outer[trained.name] = arrays[count * workers :]
        return own, {"outer": outer} if any(outer.values()) else {}

    def _with_outer(self, histories: Sequence[History], state: Mapping[str, Any]) -> list[History]:
        """Return histories with the outer rule's from a checkpoint added, which all workers share:
        worker 0 has saved them.
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

    def _save_own(self) -> list[dict[str, Any]]:
        """Return the state of the rule that is each virtual worker's own, of this process."""
        return [{} for _ in self._turns.own]

    @abstractmethod
    def _load_how(self, state: Mapping[str, Any]) -> None:
        """Load these states, and open the exchange again with the module's tensors, which are
        loaded.
        """
