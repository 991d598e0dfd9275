"""One chunk on its shard: its value, its history, and the gradients of the present iteration.

The gradients are added in the tree of virtual workers (`virtual_workers.py`), as soon as two halves
of a node have come.

Law: memory is taken when the chunk is made and when its first value comes; an iteration needs no
more than the memory that its messages came in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ps_server.codecs.base import Coder
from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.packed_rows import ChunkRows, Packed
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import NUMPY_TYPES, EncodedReplica, WorkersCopy, as_tensor, key_of
from ps_server.protocol.settings import Keeping, Precision, RuleKind, TableSpec
from ps_server.protocol.virtual_workers import Node, TreeSum
from ps_server.rules import (
    TILE,
    Halves,
    exact_sum,
    history_count,
    squares_of,
    update,
    update_in_one_pass,
)

NOTHING = Halves(torch.empty(0))


class Cell:
    """One chunk: its value, its history, and the gradients of the present iteration."""

    __slots__ = (
        "adds_changes",
        "arrived",
        "awaited",
        "begun",
        "chunk",
        "clock",
        "coder",
        "complete",
        "eager",
        "history",
        "lent",
        "nodes",
        "own",
        "packed",
        "parts",
        "push_size",
        "push_type",
        "rate",
        "received",
        "replica",
        "rows",
        "skipped",
        "spec",
        "stale",
        "sum",
        "tree",
        "unsent",
        "value",
        "value_is_shared",
        "virtual_workers",
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
        self.adds_changes = spec.adds_changes
        # the codec of pushes
        self.coder = None if spec.gradient_codec is None else Coder(spec.gradient_codec)
        self.push_type = push_type if self.coder is None else np.dtype(np.uint8)
        self.push_size = chunk.size if self.coder is None else self.coder.size(chunk.size)
        self.value: Tensor | None = None
        self.value_is_shared = False
        count = history_count(spec.rule.kind) if spec.follows_gradients else 0
        self.history = [torch.zeros(chunk.size) for _ in range(count)]
        self.clock = clock
        self.own = dict.fromkeys(nodes, clock)
        self.virtual_workers = max(each[-1].stop for each in nodes.values())
        self.nodes = nodes
        self._await()
        self.begun = False  # whether a push of this iteration has come
        # of this iteration's gradients: their average, in memory that they came in
        self.sum = NOTHING
        self.tree = TreeSum(self.virtual_workers, self._add_halves)
        self.arrived: dict[int, m.Payload] = {}  # encoded ones, by virtual worker
        # by rank, where a quorum ends a round; None: every iteration needs all workers
        self.parts: dict[int, Tensor] | None = {} if quorum else None
        self.replica: WorkersCopy | EncodedReplica | None = None  # where values travel as changes
        self.rows = ChunkRows.of(chunk, spec.row_elements) if packs_rows else None
        self.packed: Packed | None = None  # of the value, without the other rows
        self.skipped = False  # whether the pushes of this iteration are empty
        self.unsent: Tensor | None = None  # of a resumed run, until the replica is made
        self.complete = False
        self.lent = False  # whether messages have the memory of what `saved` returns
        self.rate = 0.0
        self.stale: set[int] = set()  # workers that lack a change of another worker
        # workers that may get one value before the slowest clock moves
        self.eager = set(nodes)
        self.waiting: list[tuple[int, int]] = []

    @property
    def name(self) -> str:
        return f"table '{self.spec.name}' chunk {self.chunk.index}"

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

    def _await(self) -> None:
        """Await the nodes of each worker in the iteration that begins."""
        self.received = dict.fromkeys(self.nodes, 0)  # pushes of each worker in this iteration
        self.awaited = sum(map(len, self.nodes.values()))

    def make_replica(self, precision: Precision) -> None:
        """Keep the workers' value from here on, where the next values travel as
        changes in this precision or by the codec.
        """
        if self.value is None:
            return
        if self.spec.value_codec is not None:
            replaces = self.spec.rule.kind is RuleKind.MEAN
            self.replica = EncodedReplica(
                self.value, self.chunk, self.spec.value_codec, replaces=replaces
            )
            if self.unsent is not None and self.replica.held_back is not None:
                self.replica.held_back.copy_(self.unsent)
            elif self.unsent is not None:
                self.value = self.unsent
            self.unsent = None
        elif precision is not Precision.FLOAT32:
            self.replica = WorkersCopy(self.value, precision)

    def share_value(self, allocate: Callable[[int], Tensor | None]) -> None:
        """Keep the value from here on in memory that a worker of this host reads, where it travels
        as it is and there is some.

        Args:
            allocate: returns such memory for so many numbers, or None.
        """
        travels = self.replica is None and self.rows is None and self.parts is None
        if (
            self.value is None
            or not travels
            or self.adds_changes
            or self.spec.keeping is not Keeping.GRADIENTS
            or self.spec.held_as is not Precision.FLOAT32
        ):
            return
        shared = allocate(self.chunk.size)
        if shared is not None:
            self.value = shared.copy_(self.value)
            self.value_is_shared = True

    def saved(self) -> list[Tensor]:
        """Return what a snapshot holds besides the workers' value: the history; with
        a codec of values the shard's own, too.

        In place of the value of a mean, which has none of its own: what was not sent of it.
        """
        if self.spec.held_as is not Precision.FLOAT32 and self.value is not None:
            return [*self.history, self.value]
        if not isinstance(self.replica, EncodedReplica) or self.value is None:
            return self.history
        held_back = self.replica.held_back
        return [*self.history, self.value if held_back is None else held_back]

    def lend(self) -> list[Tensor]:
        """Return what `saved` returns; it will not be written to."""
        self.lent = True
        return self.saved()

    def _leave_lent(self) -> None:
        """Go on in copies of what messages have."""
        self.lent = False
        self.history = [tensor.clone() for tensor in self.history]
        if isinstance(self.replica, EncodedReplica) and self.replica.held_back is not None:
            self.replica.held_back = self.replica.held_back.clone()
        elif self.spec.has_own_value and self.value is not None:
            self.value = self.value.clone()

    def restore(self, arrays: Sequence[m.Payload]) -> None:
        """Take the workers' first value, and what `saved` returned if a run is resumed.

        Raises:
            RemoteProtocolError: the arrays do not fit.
        """
        most = 1 + len(self.history) + self.spec.has_own_value
        if len(arrays) not in (1, 1 + len(self.history), most):
            raise RemoteProtocolError(f"{self.name} got {len(arrays) - 1} history arrays")
        if arrays[0].dtype != NUMPY_TYPES[self.spec.held_as]:
            raise RemoteProtocolError(f"{self.name} got a first value of {arrays[0].dtype}")
        for array in arrays:
            self.check_size(array)
        self.value = as_tensor(arrays[0]).to(torch.float32, copy=True)
        for tensor, array in zip(self.history, arrays[1:], strict=False):
            tensor.copy_(as_tensor(array))
        own = as_tensor(arrays[-1]).clone() if len(arrays) > 1 + len(self.history) else None
        if own is not None and self.spec.value_codec is None:
            self.value = own
        else:
            self.unsent = own

    def check_size(self, array: m.Payload) -> None:
        """Raise an error where an array has a different size.

        Raises:
            RemoteProtocolError: it is of a different size.
        """
        if array.size != self.chunk.size:
            raise RemoteProtocolError(
                f"{self.name} has {self.chunk.size} elements; {array.size} came"
            )

    def check_push(self, rank: int, push: m.Push) -> None:
        """Raise an error where a worker may not push this now.

        Raises:
            RemoteProtocolError: says what does not fit.
        """
        if self.spec.keeping is Keeping.COPY:
            raise RemoteProtocolError(f"{self.name} is a copy; worker {rank} may not push to it")
        empty = push.array.size == 0 and self.spec.may_skip and self.parts is None
        if self.rows is not None and push.array.dtype == np.uint8:
            self.rows.check(push.array.view(np.uint8))
        elif push.array.dtype != self.push_type and not empty:
            raise RemoteProtocolError(f"worker {rank} pushes {self.name} as {push.array.dtype}")
        elif push.array.size != self.push_size and not empty:
            kind = "elements" if self.coder is None else "encoded bytes"
            raise RemoteProtocolError(
                f"{self.name} takes {self.push_size} {kind}; {push.array.size} came"
            )
        if self.coder is not None and not empty:
            self.coder.check(push.array.view(np.uint8), self.chunk.size)
        if push.clock != self.own[rank]:
            raise RemoteProtocolError(
                f"worker {rank} pushes iteration {push.clock} of {self.name}; expected "
                f"{self.own[rank]}"
            )
        if self.adds_changes:
            return
        if push.count != 1:
            raise RemoteProtocolError(
                f"worker {rank} pushes {push.count} iterations of {self.name} at once"
            )
        if push.clock != self.clock if self.parts is None else rank in self.parts:
            raise RemoteProtocolError(
                f"worker {rank} pushes {self.name} again before its new value arrived"
            )
        if push.rate != self.rate and self.begun:
            raise RemoteProtocolError(
                f"worker {rank} has rate {push.rate} in iteration {push.clock}; the others have "
                f"{self.rate}"
            )

        if empty != self.skipped and self.begun:
            raise RemoteProtocolError(
                f"worker {rank} {'skips' if empty else 'pushes'} {self.name} in iteration "
                f"{push.clock}, other than the others"
            )

    def take(self, rank: int, push: m.Push) -> None:
        """Take the next sum of a worker, and add those that have come, as far as the tree allows;
        encoded ones when all have come, in one pass.

        The last one makes the sum an average, and the cell complete.
        """
        self.rate = push.rate
        self.skipped = push.array.size == 0
        self.begun = True
        if self.parts is not None:
            self.parts[rank] = own_tensor(push.array)
            self.own[rank] += 1
            return
        node = self.nodes[rank][self.received[rank]]
        self.received[rank] += 1
        if self.received[rank] == len(self.nodes[rank]):
            self.own[rank] += 1
        if self.coder is not None and not self.skipped:
            self.arrived[node.start] = push.array
            if len(self.arrived) == self.virtual_workers:
                self._average_encoded(self.coder)
        elif not self.skipped:
            self.tree.put(node, self._whole(push.array))
        self.awaited -= 1
        self.complete = self.awaited == 0
        if self.complete and self.tree.parts:
            root = Node(0, self.virtual_workers)
            total = self.tree.parts.pop(root)
            if node == root:  # it came in one push
                self.sum = Halves(total.div_(self.virtual_workers) if root.stop > 1 else total)

    def _whole(self, array: m.Payload) -> Tensor:
        if self.rows is None or array.dtype != np.uint8:
            return own_tensor(array)
        whole = torch.zeros(self.chunk.size)
        self.rows.unpack(array.view(np.uint8), whole.numpy())
        return whole

    def end_round(self, shares: Mapping[int, float]) -> None:
        """Take the average of these workers' parts, by their shares in it. `apply` follows."""
        assert self.parts is not None
        total: Tensor | None = None
        for rank, share in shares.items():
            part = self.parts.pop(rank)
            total = part.mul_(share) if total is None else total.add_(part, alpha=share)
        assert total is not None
        self.sum = Halves(total)
        self.complete = True

    def apply(self, scale: float) -> None:
        """Make the next value from the average, times `scale` if it is of gradients, and begin
        the next iteration.
        """
        if self.lent:
            self._leave_lent()
        is_mean = self.spec.rule.kind is RuleKind.MEAN
        before = None
        if self.rows is not None and self.value is not None and not is_mean:
            before = self.value.numpy().copy()
        if self.spec.keeping is Keeping.AVERAGE:
            self.value = self._average()  # the memory it arrived in becomes the chunk's own
        elif is_mean and not self.skipped:
            self._take_mean(scale)
        elif not self.skipped:
            self.update(scale)
        if self.rows is not None and self.value is not None and is_mean:
            self.packed = self.rows.pack_nonzero(self.value.numpy())
        elif self.rows is not None and self.value is not None and before is not None:
            self.packed = self.rows.pack_changed(self.value.numpy(), before)
        self.sum = NOTHING
        self.clock += 1
        self._await()
        self.begun = False
        self.complete = False

    def squares(self) -> tuple[float, ...]:
        """Return the sum of squares of the average gradient, as numbers whose exact sum it is."""
        return exact_sum(squares_of(self._average(), self.spec.parts))

    def _add_halves(self, left: Tensor, right: Tensor, node: Node) -> Tensor:
        """Add the halves of a node in the memory of the left one; those of all virtual workers are
        added where their average is used.
        """
        if node.stop - node.start == self.virtual_workers:
            self.sum = Halves(left, right, self.virtual_workers)
        else:
            left.add_(right)
        return left

    def _average(self) -> Tensor:
        """Return the average of this iteration's gradients."""
        left, right, _ = self.sum
        if right is not None:
            self.sum.write_mean(left)
            self.sum = Halves(left)
        return left

    def _average_encoded(self, coder: Coder) -> None:
        pushes = [self.arrived[v].view(np.uint8) for v in range(self.virtual_workers)]
        average = torch.empty(self.chunk.size)
        coder.average(average.numpy(), pushes, key_of(self.chunk, self.clock))
        self.sum = Halves(average)
        self.arrived.clear()

    def _take_mean(self, scale: float) -> None:
        if self.value_is_shared and self.value is not None:
            self.sum.write_mean(self.value)
        else:
            self.value = self._average()
        if scale != 1.0:
            self.value.mul_(scale)

    def update(self, scale: float) -> None:
        """Apply the rule to the average times `scale`: in one pass if there is one, otherwise tile
        by tile: a tile stays in the cache for all operations. A matrix is one tile.
        """
        assert self.value is not None
        rule, rate, step = self.spec.rule, self.rate, self.clock
        if scale == 1.0 and update_in_one_pass(
            rule, self.sum, self.history, self.value, rate=rate, step=step
        ):
            return
        for gradient, value, *history in self._tiles(self._average(), self.value, *self.history):
            if scale != 1.0:
                gradient.mul_(scale)
            update(rule, gradient, history, value, rate=rate, step=step)

    def _tiles(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        if self.chunk.size <= TILE or self.spec.is_whole:
            return iter((tensors,))
        return zip(*(tensor.split(TILE) for tensor in tensors), strict=True)


def own_tensor(array: m.Payload) -> Tensor:
    """Return a float32 tensor to write to, where possible over the array: the memory of a
    message has no other user.
    """
    return as_tensor(array).float()
