"""The pushes to one chunk in the present iteration, and their sum.

Gradients are added in the tree of virtual workers (`virtual_workers.py`), as soon as two halves of
a node have come; encoded ones when all have come, in one pass.

Law: an iteration needs no more than the memory that its messages came in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ps_server.codecs.base import Coder
from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.packed_rows import ChunkRows
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import as_tensor, key_of
from ps_server.protocol.settings import TableSpec
from ps_server.protocol.virtual_workers import Node, TreeSum
from ps_server.rules import Halves

NOTHING = Halves(torch.empty(0))


def chunk_name(chunk: Chunk, spec: TableSpec) -> str:
    """Return the name of a chunk, for messages."""
    return f"table '{spec.name}' chunk {chunk.index}"


@dataclass(frozen=True, slots=True)
class PushForm:
    """What the array of a push to a chunk is.

    Attributes:
        chunk: the chunk.
        name: of the chunk, for messages.
        type: of the array's elements.
        size: their number.
        coder: of the codec; None: none.
        rows: of the chunk, which a push may leave out; None: none.
    """

    chunk: Chunk
    name: str
    type: np.dtype[np.generic]
    size: int
    coder: Coder | None
    rows: ChunkRows | None

    @classmethod
    def of(
        cls, chunk: Chunk, spec: TableSpec, plain: np.dtype[np.generic], *, packs_rows: bool
    ) -> PushForm:
        """Return the form of a chunk's pushes. `plain` is their type without a codec."""
        name = chunk_name(chunk, spec)
        rows = ChunkRows.of(chunk, spec.row_elements) if packs_rows else None
        if spec.gradient_codec is None:
            return cls(chunk, name, plain, chunk.size, None, rows)
        coder = Coder(spec.gradient_codec)
        return cls(chunk, name, np.dtype(np.uint8), coder.size(chunk.size), coder, rows)

    def check(self, rank: int, array: m.Payload) -> None:
        """Raise an error where a worker may not push an array.

        Raises:
            RemoteProtocolError: says what does not fit.
        """
        if self.rows is not None and array.dtype == np.uint8:
            self.rows.check(array.view(np.uint8))
        elif array.dtype != self.type:
            raise RemoteProtocolError(f"worker {rank} pushes {self.name} as {array.dtype}")
        elif array.size != self.size:
            kind = "elements" if self.coder is None else "encoded bytes"
            raise RemoteProtocolError(f"{self.name} takes {self.size} {kind}; {array.size} came")
        if self.coder is not None:
            self.coder.check(array.view(np.uint8), self.chunk.size)


class IterationSum:
    """The pushes of an iteration and their sum.

    Args:
        nodes: whose sums each worker pushes, in their order, by rank.
        form: of the pushes.

    Attributes:
        begun: whether a push of this iteration has come.
        rate: of the last push.
        skipped: whether the last push was empty.
    """

    __slots__ = (
        "_arrived",
        "_awaited",
        "_form",
        "_nodes",
        "_received",
        "_root",
        "_sum",
        "_tree",
        "begun",
        "rate",
        "skipped",
    )

    def __init__(self, nodes: Mapping[int, Sequence[Node]], form: PushForm) -> None:
        self._nodes = nodes
        self._form = form
        self._root = Node(0, max(each[-1].stop for each in nodes.values()))
        self._tree = TreeSum(self._root.stop, self._add_halves)
        self._arrived: dict[int, m.Payload] = {}  # encoded ones, by virtual worker
        self.rate = 0.0
        self.skipped = False
        self.start()

    def start(self) -> None:
        """Begin an iteration: await the nodes of each worker."""
        self._sum = NOTHING  # their average, in memory that they came in
        self._received = dict.fromkeys(self._nodes, 0)  # pushes of each worker
        self._awaited = sum(map(len, self._nodes.values()))
        self.begun = False

    @property
    def is_complete(self) -> bool:
        """Whether all pushes have come."""
        return self._awaited == 0

    def note(self, push: m.Push) -> None:
        """Note what all pushes of the iteration have in common with this one."""
        self.rate = push.rate
        self.skipped = push.array.size == 0
        self.begun = True

    def put(self, rank: int, push: m.Push, clock: int) -> bool:
        """Take the next sum of a worker, and add those that have come, as far as the tree allows.

        Return whether it was the worker's last one of this iteration, `clock`.
        """
        self.note(push)
        own = self._nodes[rank]
        node = own[self._received[rank]]
        self._received[rank] += 1
        self._awaited -= 1
        if self.skipped:
            pass
        elif self._form.coder is not None:
            self._arrived[node.start] = push.array
            if self.is_complete:
                self._average_encoded(self._form.coder, clock)
        else:
            self._tree.put(node, self._whole(push.array))
            total = self._tree.parts.pop(self._root, None)
            if total is not None and node == self._root:  # it came in one push
                self._sum = Halves(total.div_(node.stop) if node.stop > 1 else total)
        return self._received[rank] == len(own)

    def set_average(self, average: Tensor) -> None:
        """Let this be the average of the gradients."""
        self._sum = Halves(average)

    def halves(self) -> Halves:
        """Return the average of the gradients."""
        return self._sum

    def average(self) -> Tensor:
        """Return the average of the gradients as one tensor, which may be written to."""
        if self._sum.right is not None:
            self._sum.write_mean(self._sum.left)
            self._sum = Halves(self._sum.left)
        return self._sum.left

    def _whole(self, array: m.Payload) -> Tensor:
        if self._form.rows is None or array.dtype != np.uint8:
            return own_tensor(array)
        whole = torch.zeros(self._form.chunk.size)
        self._form.rows.unpack(array.view(np.uint8), whole.numpy())
        return whole

    def _add_halves(self, left: Tensor, right: Tensor, node: Node) -> Tensor:
        """Add the halves of a node in the memory of the left one; those of all virtual workers are
        added where their average is used.
        """
        if node == self._root:
            self._sum = Halves(left, right, node.stop)
        else:
            left.add_(right)
        return left

    def _average_encoded(self, coder: Coder, clock: int) -> None:
        pushes = [self._arrived[v].view(np.uint8) for v in range(self._root.stop)]
        average = torch.empty(self._form.chunk.size)
        coder.average(average.numpy(), pushes, key_of(self._form.chunk, clock))
        self._sum = Halves(average)
        self._arrived.clear()


def own_tensor(array: m.Payload) -> Tensor:
    """Return a float32 tensor to write to, where possible over the array: the memory of a
    message has no other user.
    """
    return as_tensor(array).float()
