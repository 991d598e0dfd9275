"""What a job needs to continue, as named leaves, each with a scope.

From one tree come a snapshot on disk and in memory, a start from either, a start with a different
number of virtual workers, and the comparison of replicas. A part of the program that has state
declares its leaves once.

    {"model": ..., "steps": 3, "own": [{"random": ..., "samplers": ...}, ...]}

A value of the tree has the leaves of all workers by name, and in `own` a mapping for each virtual
worker.

Laws:
* A leaf is read after a step that all workers have ended, and written before the first step.
* All workers write the same values, so all refuse what does not fit.
* Leaves are written in the order of their stages, in whatever order they were declared.
* Two leaves of one name have one value: what all workers have and what rank 0 alone has are united,
  and both leaves take the whole.
* A copy in memory (`StateTree.copy`) is of one iteration, too, though training continues while its
  parts arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from poseidon.engine.kept_state import KeptState, StateCopy
from poseidon.engine.leaf import Found, Leaf, LeafStage, Scope, StateSource, packed, unpacked
from poseidon.errors import SnapshotError
from poseidon.exchange.broadcast import Gather, broadcast_bytes, gather_bytes
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from ps_server.collection import Coming

NOTHING: Mapping[str, Any] = {}


class StateTree:
    """The leaves of one training loop.

    Attributes:
        own: the virtual workers of this process.
        count: of the job's virtual workers.
    """

    def __init__(self, member: Membership) -> None:
        self.own = member.own
        self.count = member.by_worker.count
        self._rank = member.network.rank
        self._plane = member.plane_ranks if member.divides else ()
        self._leaves: list[Leaf] = []
        self._at = 0

    def add(self, leaves: Iterable[Leaf]) -> None:
        """Declare leaves."""
        self._leaves.extend(leaves)

    def enter(self, at: int) -> None:
        """Put in place what a virtual worker has of its own. Between two iterations it is what the
        first one has.

        Args:
            at: its place among the virtual workers of this process.
        """
        if at != self._at:
            self._at = at
            for leaf in self._leaves:
                if leaf.enter is not None:
                    leaf.enter(at)

    def each(self) -> Iterator[int]:
        """Yield each virtual worker of this process, with what it has in place."""
        for at, virtual_worker in enumerate(self.own):
            self.enter(at)
            yield virtual_worker
        self.enter(0)

    def read(
        self,
        gather: Gather,
        *,
        keeps: bool,
        known: Mapping[str, Any] = NOTHING,
        of_plane: bool = False,
    ) -> dict[str, Any]:
        """Return the state of all workers where it is kept; else an empty dict.

        All workers call it together.

        Args:
            known: values of shared leaves that are here already.
            of_plane: of tensors that are divided, the state has the parts of this worker's plane
                alone.
        """
        plane = self._plane if of_plane else ()
        root = min(plane, default=0)

        def value(leaf: Leaf, *, keeps: bool) -> Any:
            return leaf.read() if leaf.together is None else leaf.together(keeps, of_plane)

        of_each = {leaf.name: value(leaf, keeps=keeps) for leaf in self._of(Scope.VIRTUAL)}
        of_root = {
            leaf.name: value(leaf, keeps=self._rank == root) for leaf in self._of(Scope.ROOT)
        }
        for leaf in self._of(Scope.SHARED):
            if leaf.together is not None:
                known = {**known, leaf.name: leaf.together(keeps, of_plane)}
        sent = self._sent(of_root, of_each, root=root)
        parts = gather_bytes(sent, gather, keeps=keeps, ranks=plane)
        if not keeps:
            return {}
        shared = {
            leaf.name: known[leaf.name] if leaf.name in known else leaf.read()
            for leaf in self._of(Scope.SHARED)
        }
        return KeptState(count=self.count, shared=shared, sent=dict(enumerate(parts))).whole()

    def _sent(
        self, of_root: Mapping[str, Any], of_each: Mapping[str, Sequence[Any]], *, root: int = 0
    ) -> bytes:
        """Return what this worker sends to those that keep the state."""
        mine = {
            number: {name: values[at] for name, values in of_each.items()}
            for at, number in enumerate(self.own)
        }
        return packed([of_root if self._rank == root else {}, mine])

    def copy(
        self, control: JobControl, *, keeps: bool, note: bytes, before: KeptState | None
    ) -> StateCopy:
        """Begin to copy the state of all workers to those that keep it, while training continues.

        All workers call it together. A worker that does not keep it has its own part.

        Args:
            note: for all workers.
            before: may be written to.
        """
        old = {} if before is None else before.shared
        of_each, of_root, shared = dict[str, Any](), dict[str, Any](), dict[str, Coming[Any]]()
        for leaf in self._leaves:
            if leaf.scope is Scope.VIRTUAL:
                of_each[leaf.name] = leaf.read() if leaf.copy is None else leaf.copy(None)
            elif leaf.copy is not None and keeps:
                shared[leaf.name] = leaf.copy(old.get(leaf.name))
            elif leaf.copy is None and leaf.scope is Scope.ROOT:
                of_root[leaf.name] = leaf.read()
            elif leaf.copy is None and keeps:
                shared[leaf.name] = _here(leaf.read())
        return StateCopy(
            self._sent(of_root, of_each),
            shared,
            control,
            count=self.count,
            rank=self._rank,
            keeps=keeps,
            note=note,
        )

    def brought(
        self, content: bytes | None, source: StateSource, gather: Gather, *, root: int = 0
    ) -> Any:
        """Return the state of the root's bytes on all workers, not checked yet; None: it has none."""
        found = broadcast_bytes(content, gather, rank=self._rank, root=root)
        return None if found is None else unpacked(found, source.name)

    def check(self, state: Mapping[str, Any], source: StateSource) -> None:
        """Raise SnapshotError for another job's state, before anything is written."""
        own = state.get("own")
        if (
            not isinstance(own, list)
            or not all(isinstance(one, Mapping) for one in own)
            or not 0 < len(own) == state.get("workers")
        ):
            raise SnapshotError(f"{source.name} is damaged: it lacks the states of workers")
        for leaf in self._leaves:
            if not (leaf.may_miss or self._has(state, own, leaf)):
                raise SnapshotError(
                    f"{source.name} has no '{leaf.name}': it is damaged, or was made by hand"
                )
            leaf.check(self._found(state, leaf, source))

    def write(
        self,
        state: Mapping[str, Any],
        source: StateSource,
        opens: Callable[[], object],
        on_resized: Callable[[Mapping[str, Any], StateSource], object] = lambda *_: None,
        gather: Gather | None = None,
    ) -> None:
        """Load a state. All workers call it together.

        Args:
            opens: called before the stages after `UPDATE`.
            on_resized: called with a state of a different number of virtual workers.
            gather: brings the stages after `UPDATE` from rank 0, once the exchange is open. It has
                brought the others, but for what a worker has of its own. None: all have the state.

        Raises:
            SnapshotError: it does not fit.
        """
        if state["workers"] != self.count:
            on_resized(state, source)
            state = self._resized(state, source)
        of_open = [leaf for leaf in self._leaves if leaf.stage <= LeafStage.UPDATE]
        self._write(of_open, state, source)
        opens()
        if gather is not None:
            names = {leaf.name for leaf in of_open}
            rest = packed(_without(state, names)) if self._rank == 0 else None
            state = self.brought(rest, source, gather)
        self._write([leaf for leaf in self._leaves if leaf not in of_open], state, source)

    def _write(self, leaves: Sequence[Leaf], state: Mapping[str, Any], source: StateSource) -> None:
        for leaf in sorted(leaves, key=lambda leaf: leaf.stage):
            leaf.write(self._found(state, leaf, source))

    def _resized(self, state: Mapping[str, Any], source: StateSource) -> dict[str, Any]:
        """Return a state of a different number of virtual workers for this job's.

        Raises:
            SnapshotError: a leaf belongs to each worker of the saved job.
        """
        each = {}
        for leaf in self._of(Scope.VIRTUAL):
            found = self._found(state, leaf, source)
            each[leaf.name] = leaf.resize(found) if found.each else None
        restarted = {leaf.name: None for leaf in self._leaves if leaf.stage is LeafStage.RANDOM}
        return {**state, **restarted, "workers": self.count, "own": [each] * self.count}

    def _has(self, state: Mapping[str, Any], own: Sequence[Mapping[str, Any]], leaf: Leaf) -> bool:
        """Return whether a state has a leaf, in its own scope or, if no other leaf has the name, in
        another one.
        """
        is_alone = [one.name for one in self._leaves].count(leaf.name) == 1
        of_each = all(leaf.name in one for one in own)
        if leaf.scope is Scope.VIRTUAL:
            return of_each or (is_alone and leaf.name in state)
        return leaf.name in state or (is_alone and of_each)

    def _of(self, scope: Scope) -> list[Leaf]:
        return [leaf for leaf in self._leaves if leaf.scope is scope]

    def _found(self, state: Mapping[str, Any], leaf: Leaf, source: StateSource) -> Found:
        own: Sequence[Mapping[str, Any]] = state["own"]
        each = [one.get(leaf.name) for one in own]
        if all(value is None for value in each):
            each = []
        return Found(shared=state.get(leaf.name), each=each, own=self.own, source=source)


def _without(state: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return a state without some leaves."""
    own = [{n: value for n, value in one.items() if n not in names} for one in state["own"]]
    return {**{n: value for n, value in state.items() if n not in names}, "own": own}


def _here(value: Any) -> Coming[Any]:
    """Return what is here already, maybe None."""
    return Coming(lambda: True, lambda: value)
