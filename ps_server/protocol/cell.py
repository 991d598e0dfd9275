"""One chunk on its shard: what is stored of it, the pushes of the present iteration, and who waits
for its value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.iteration_sum import IterationSum, PushForm, own_tensor
from ps_server.protocol.packed_rows import Packed
from ps_server.protocol.placement import Chunk
from ps_server.protocol.settings import Keeping, RuleKind, TableSpec
from ps_server.protocol.stored_chunk import StoredChunk
from ps_server.protocol.virtual_workers import Node
from ps_server.rules import exact_sum, squares_of


class Cell:
    """One chunk.

    Attributes:
        chunk: the chunk.
        spec: its table.
        clock: of its value.
        own: the clock of each worker's next push, by rank.
        form: of pushes.
        pushes: of the present iteration.
        stored: its value and history.
        parts: where a quorum ends a round, those that have come, by rank; None: every iteration
            needs all workers.
        packed: the last value without the rows that did not change; None: it is sent whole.
        stale: workers that lack a change of another worker.
        eager: workers that may get one value before the slowest clock moves.
        waiting: ranks that have asked for a value, with its clock.
    """

    __slots__ = (
        "chunk",
        "clock",
        "eager",
        "form",
        "own",
        "packed",
        "parts",
        "pushes",
        "spec",
        "stale",
        "stored",
        "waiting",
    )

    def __init__(
        self,
        chunk: Chunk,
        spec: TableSpec,
        nodes: Mapping[int, Sequence[Node]],
        clock: int,
        push_type: np.dtype[np.generic],
        *,
        packs_rows: bool = False,
        quorum: bool = False,
    ) -> None:
        """Make the cell of a chunk.

        Args:
            chunk: the chunk.
            spec: its table.
            nodes: whose sums each worker of the table's plane pushes in an iteration, in their
                order, by rank; those of host 0 first.
            clock: of its first value.
            push_type: of pushes without a codec.
            packs_rows: whether pushes and values may leave out rows.
            quorum: whether a quorum of the workers ends a round (`quorum.py`).
        """
        self.chunk = chunk
        self.spec = spec
        self.clock = clock
        self.own = dict.fromkeys(nodes, clock)
        self.form = PushForm.of(chunk, spec, push_type, packs_rows=packs_rows)
        self.pushes = IterationSum(nodes, self.form)
        self.stored = StoredChunk(chunk, spec)
        self.parts: dict[int, Tensor] | None = {} if quorum else None
        self.packed: Packed | None = None
        self.stale: set[int] = set()
        self.eager = set(nodes)
        self.waiting: list[tuple[int, int]] = []

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def workers(self) -> Collection[int]:
        """The workers that push to it and get its values; the first of them gives its first."""
        return self.own.keys()

    def is_behind(self, rank: int, other: int) -> bool:
        """Return whether a worker has pushed less than another one, and it takes pushes of both."""
        own = self.own
        if rank not in own or other not in own:
            return False
        return own[rank] < own[other] or other in (self.parts or ())

    @property
    def has_pushes(self) -> bool:
        """Whether workers push to it: it is not a copy."""
        return self.spec.keeping is not Keeping.COPY

    @property
    def is_complete(self) -> bool:
        """Whether all pushes of the present iteration have come."""
        return self.pushes.is_complete

    def share_value(self, allocate: Callable[[int], Tensor | None]) -> None:
        """See `StoredChunk.share_value`."""
        if self.form.rows is None and self.parts is None:
            self.stored.share_value(allocate)

    def check_push(self, rank: int, push: m.Push) -> None:
        """Raise an error where a worker may not push this now.

        Raises:
            RemoteProtocolError: says what does not fit.
        """
        if not self.has_pushes:
            raise RemoteProtocolError(f"{self.name} is a copy; worker {rank} may not push to it")
        pushes = self.pushes
        empty = push.array.size == 0 and self.spec.may_skip and self.parts is None
        if not empty:
            self.form.check(rank, push.array)
        if push.clock != self.own[rank]:
            raise RemoteProtocolError(
                f"worker {rank} pushes iteration {push.clock} of {self.name}; expected "
                f"{self.own[rank]}"
            )
        if self.spec.adds_changes:
            return
        if push.count != 1:
            raise RemoteProtocolError(
                f"worker {rank} pushes {push.count} iterations of {self.name} at once"
            )
        if push.clock != self.clock if self.parts is None else rank in self.parts:
            raise RemoteProtocolError(
                f"worker {rank} pushes {self.name} again before its new value arrived"
            )
        if push.rate != pushes.rate and pushes.begun:
            raise RemoteProtocolError(
                f"worker {rank} has rate {push.rate} in iteration {push.clock}; the others have "
                f"{pushes.rate}"
            )
        if empty != pushes.skipped and pushes.begun:
            raise RemoteProtocolError(
                f"worker {rank} {'skips' if empty else 'pushes'} {self.name} in iteration "
                f"{push.clock}, other than the others"
            )

    def take(self, rank: int, push: m.Push) -> None:
        """Take the next sum of a worker. The last one makes the cell complete."""
        if self.parts is None:
            self.own[rank] += self.pushes.put(rank, push, self.clock)
        else:
            self.pushes.note(push)
            self.parts[rank] = own_tensor(push.array)
            self.own[rank] += 1

    def end_round(self, shares: Mapping[int, float]) -> None:
        """Take the average of these workers' parts, by their shares in it. `apply` follows."""
        assert self.parts is not None
        total: Tensor | None = None
        for rank, share in shares.items():
            part = self.parts.pop(rank)
            total = part.mul_(share) if total is None else total.add_(part, alpha=share)
        assert total is not None
        self.pushes.set_average(total)

    def apply(self, scale: float) -> None:
        """Make the next value from the average, times `scale` if it is of gradients, and begin
        the next iteration.
        """
        stored, rows, before = self.stored, self.form.rows, None
        is_mean = self.spec.rule.kind is RuleKind.MEAN
        if rows is not None and stored.value is not None and not is_mean:
            before = stored.value.numpy().copy()
        stored.follow(self.pushes, scale, self.clock)
        if rows is not None and stored.value is not None:
            value = stored.value.numpy()
            packed = (
                rows.pack_nonzero(value) if before is None else rows.pack_changed(value, before)
            )
            self.packed = packed
        self.clock += 1
        self.pushes.start()

    def squares(self) -> tuple[float, ...]:
        """Return the sum of squares of the average gradient, as numbers whose exact sum it is."""
        return exact_sum(squares_of(self.pushes.average(), self.spec.parts))
