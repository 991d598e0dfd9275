"""The saved states of a group: checkpoints on disk, snapshots in memory, and starts from either.

All of them are one state (`poseidon/engine/state_tree.py`), and all are loaded on one path
(`GroupCheckpoints.load`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poseidon.engine.leaf import MEMORY, Found, Leaf, Scope, StateSource, packed
from poseidon.engine.loop_table import LoopEvent, State
from poseidon.engine.snapshot_files import NO_RUN, Run, WrittenSnapshot, make_folder
from poseidon.engine.snapshot_runs import CHECKPOINT, Prefixes, later_of_others, newest_intact
from poseidon.errors import SnapshotError, UsageError, counted
from poseidon.torch.checkpoint_file import (
    checked,
    checkpoint_path,
    read_checkpoint,
    write_checkpoint,
)
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.kept import Kept, KeptLeaves
from poseidon.torch.leaves import CodecLeaves, ModuleLeaves, progress_leaves
from poseidon.torch.shared_data import SEVERAL


class GroupCheckpoints:
    """The saved states of one group."""

    def __init__(self, loop: GroupLoop) -> None:
        self._loop = loop
        self._context = loop.context
        self._kept = KeptLeaves(loop.tree, has_shards=bool(loop.update.plan.shards))
        self._groups: dict[str, GroupCheckpoints] = {}
        self._resumed: Path | None = None
        """The checkpoint that this group has resumed from, on rank 0."""
        self._says_where = False
        if loop.context.checkpoint is not None:
            loop.on(LoopEvent.AWAIT)
        loop.tree.add(
            [
                *progress_leaves(loop),
                Leaf(
                    name="groups",
                    scope=Scope.SHARED,
                    read=dict,
                    together=self._read_groups,
                    check=self._check_groups,
                    write=self._write_groups,
                ),
                *ModuleLeaves(loop).leaves(),
                *CodecLeaves(loop).leaves(),
                *loop.update.leaves(),
                loop.exchanged.tables.leaf(self._wait_for_rows),
                *self._kept.leaves(),
            ]
        )

    def _wait_for_rows(self) -> None:
        if self._loop.update.plan.tables and self._context.size > 1:
            self._loop.collections.gather(b"")

    def keep(self, objects: Mapping[str, Kept | GroupCheckpoints]) -> None:
        """See `Group.keep`."""
        groups = {n: one for n, one in objects.items() if isinstance(one, GroupCheckpoints)}
        for name, group in groups.items():
            if group is self or name in self._groups:
                raise UsageError(
                    f"keep() was given '{name}', which is this group itself or a name that is "
                    "taken; expected a different group, under a new name"
                )
            if group._loop.update.plan.tables:
                raise UsageError(
                    f"keep() was given '{name}', which has row tables, whose rows are in separate "
                    "files; call save(prefix) of that group"
                )
        self._kept.keep({n: o for n, o in objects.items() if not isinstance(o, GroupCheckpoints)})
        self._groups.update(groups)

    def keep_own(self, objects: Mapping[str, Kept]) -> None:
        """See `Group.keep_own`."""
        if self._context.member.takes_turns:
            raise UsageError(
                f"keep_own() has a state for each worker, {SEVERAL}; start as many workers as "
                "virtual workers, or use keep() for what is the same on all"
            )
        self._kept.keep(objects, own=True)

    def state_dict(self) -> dict[str, Any]:
        """See `Group.state_dict`."""
        if tables := self._loop.update.plan.tables:
            raise UsageError(
                f"state_dict() lacks the rows of table '{tables[0].spec.name}', which are on the "
                "shards; use save() and resume()"
            )
        return self.state("state_dict")

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """See `Group.load_state_dict`."""
        content = packed(state) if self._is_root and state is not None else None
        source = StateSource(name="what load_state_dict() was given")
        self.load("load_state_dict", content, source)

    def state(
        self, call: str, *, keeps: bool | None = None, of_plane: bool = False
    ) -> dict[str, Any]:
        """Return the whole state. Other workers are waited for under the name of the call.

        Args:
            keeps: whether this worker gets the state; None: rank 0 does.
            of_plane: of a module that is divided, this worker's parts alone.
        """
        loop = self._loop
        with loop.settled(call) as gather:
            loop.check.run(loop.session.steps)
            keeps = self._is_root if keeps is None else keeps
            return loop.tree.read(gather, keeps=keeps, of_plane=of_plane)

    def _read_groups(self, keeps: bool, of_plane: bool) -> dict[str, Any]:
        call, found = self._loop.collections.name, {}
        for name, group in self._groups.items():
            group._loop.forget_stale()
            found[name] = group.state(call, keeps=keeps, of_plane=of_plane)
        return found

    def _check_groups(self, found: Found) -> None:
        if found.shared.keys() != self._groups.keys():
            names = [", ".join(sorted(part)) or "none" for part in (found.shared, self._groups)]
            raise SnapshotError(
                f"{found.source.name} has the groups {names[0]}; this script has handed {names[1]} "
                "to keep()"
            )
        for name, group in self._groups.items():
            group._loop.session.check(LoopEvent.LOAD)
            group._check(found.shared[name], _part(name, found.source))

    def _write_groups(self, found: Found) -> None:
        for name, group in self._groups.items():
            with group._loop.collections.calling(self._loop.collections.name):
                group._write(found.shared[name], _part(name, found.source))

    def save(self, prefix: str | Path | None, *, keep: int) -> Path:
        """See `Group.save`."""
        loop, context = self._loop, self._context
        if keep < 0:
            raise UsageError(
                f"save() was given keep={keep}; expected a number of checkpoints, or 0 for all"
            )
        if prefix is None:
            self._check_first("save")
            prefix = context.prefix
            if context.folder is None and not self._says_where:
                self._says_where = True
                context.job.say(f"checkpoints go to {checkpoint_path(prefix, '<steps>')}")
        prefix = Path(prefix).absolute()
        began_s = time.monotonic()
        run = self._run(prefix) if self._is_root else NO_RUN
        state = self.state("save")
        steps = loop.session.steps
        path = checkpoint_path(prefix, steps)
        if self._is_root:
            write_checkpoint(path, packed(state), keep, loop.exchanged.tables.write, run)
            seconds = time.monotonic() - began_s
            if context.number == 0:
                context.job.saved(WrittenSnapshot(state=path, iteration=steps, seconds=seconds))
        return path

    def _run(self, prefix: Path) -> Run:
        """Return the run that checkpoints with a prefix belong to.

        Raises:
            SnapshotError: another job writes them.
        """
        loops = self._context.loops
        if loops.prefixes is None:
            loops.prefixes = Prefixes(self._context.job.name)
        make_folder(prefix.parent)
        return loops.prefixes.take(prefix, CHECKPOINT, self._resumed, self._say_earlier)

    def _say_earlier(self, path: Path) -> None:
        self._context.job.say(
            f"{path} is of an earlier run, which this run does not continue: it stays, "
            "checkpoints with the same numbers are replaced, and resume() takes this run's"
        )

    def resume(self, prefix: str | Path | None) -> bool:
        """See `Group.resume`."""
        context, memory = self._context, self._context.loop_memory
        if prefix is None:
            self._check_first("resume")
        if memory is not None and memory.resume():
            root = context.member.plane_ranks[0] if self._is_divided else 0
            return self.load("resume", memory.content, MEMORY, root=root)
        awaits = self._loop.session.state is State.AWAITING
        path = context.checkpoint if awaits and context.number == 0 else None
        if prefix is None and context.folder is None:
            prefix = context.prefix
        if path is None and prefix is not None and self._is_root:
            path = newest_intact(Path(prefix).absolute(), CHECKPOINT)
            other = None if path is None else later_of_others(path)
            if other is not None:
                context.job.say(f"{other} is of an earlier run than {path}, or damaged")
        content = read_checkpoint(path) if self._is_root and path is not None else None
        source = StateSource(
            name=str(path or "the checkpoint"), is_file=True, path=path if self._is_root else None
        )
        if not self.load("resume", content, source, needed=False):
            if context.number:
                self._loop.on(LoopEvent.LOAD_NOTHING)
            return False
        if self._is_root:
            self._resumed = path
            context.job.say(f"resuming from {path} at step {self._loop.session.steps}")
        return True

    def load(
        self,
        call: str,
        content: bytes | None,
        source: StateSource,
        *,
        needed: bool = True,
        root: int = 0,
    ) -> bool:
        """Load the root's bytes on all workers. Return False if it has none.

        Raises:
            SnapshotError: the state does not fit.
            UsageError: a step has begun, or the root has none and they are needed.
        """
        loop = self._loop
        loop.context.check_start()
        loop.session.check(LoopEvent.LOAD, call=f"{call}()")
        with loop.collections.calling(call):
            state = loop.tree.brought(content, source, loop.collections.gather, root=root)
            if state is not None:
                self._check(state, source)
                self._write(state, source)
            elif needed:
                raise UsageError(
                    "load_state_dict() was given None on rank 0; give rank 0 the state"
                )
        return state is not None

    def _check(self, state: Any, source: StateSource) -> None:
        self._loop.tree.check(checked(state, source.name), source)

    def _write(self, state: Mapping[str, Any], source: StateSource) -> None:
        self._loop.tree.write(state, source, self._reopen, self._say_resized)
        self._loop.on(LoopEvent.LOAD)

    def _reopen(self) -> None:
        self._loop.update.reopen()
        self._loop.exchanged.masters.publish_all()

    def _say_resized(self, state: Mapping[str, Any], source: StateSource) -> None:
        if self._is_root:
            saved = state["workers"]
            self._context.job.say(
                f"{source.name} is of {counted(saved, 'worker')}, and this job has "
                f"{self._loop.tree.count}: random states start from the seed; "
                f"virtual_workers={saved} continues with the same bits"
            )

    def between_iterations(self) -> None:
        """Take a memory snapshot if it is time to, between two iterations of a loader's loop."""
        memory, session = self._context.loop_memory, self._loop.session
        if memory is None or not memory.enters(session.iterations) or not self._is_whole():
            return
        collections = self._loop.collections
        with collections.calling("loader"):
            memory.between(
                lambda keeps: packed(self.state("loader", keeps=keeps, of_plane=True)),
                collections.gather,
                regroups=self._loop.exchanged.exchange.control.is_asked_to_regroup(
                    session.iterations
                ),
                is_part=self._is_divided,
            )

    @property
    def _is_divided(self) -> bool:
        """Whether the workers of a host divide the module of this group, or of one given to `keep`."""
        groups = (self, *self._groups.values())
        return any(group._loop.update.plan.shards for group in groups)

    def _is_whole(self) -> bool:
        """Return whether the state of this group and of those given to `keep` is all that the
        job trains, after a step that ends a round of local steps, if it has them.
        """
        loop, options = self._loop, self._context.member.options
        return (
            len(self._context.loops.open) <= 1 + len(self._groups)
            and not loop.session.passes
            and not loop.update.plan.tables
            and not (options.staleness or options.streams)
            and loop.session.iterations % max(1, loop.exchanged.local_steps) == 0
        )

    @property
    def _is_root(self) -> bool:
        return self._context.rank == 0

    def _check_first(self, call: str) -> None:
        """Refuse a checkpoint without a name that is not of the job's first group."""
        if self._context.number:
            raise UsageError(
                "only the first group writes checkpoints without a prefix; register this group "
                f"with first.keep(NAME=group) and call first.{call}(), or give {call}() a prefix"
            )


def _part(name: str, source: StateSource) -> StateSource:
    return StateSource(name=f"'{name}' of {source.name}")
