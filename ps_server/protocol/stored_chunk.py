"""What a shard stores of one chunk: its value, its history, and the workers' value where it differs.

Law: memory is taken when the chunk is made and when its first value comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.iteration_sum import IterationSum, chunk_name
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import NUMPY_TYPES, EncodedReplica, WorkersCopy, as_tensor
from ps_server.protocol.settings import Keeping, Precision, RuleKind, TableSpec
from ps_server.rules import TILE, history_count, update, update_in_one_pass


class StoredChunk:
    """The value and the history of a chunk.

    Attributes:
        value: float32; None before the first one has come.
        history: of the rule, float32.
        replica: the workers' value, where values travel as changes; None otherwise.
    """

    __slots__ = (
        "_chunk",
        "_is_lent",
        "_is_shared",
        "_spec",
        "_unsent",
        "history",
        "replica",
        "value",
    )

    def __init__(self, chunk: Chunk, spec: TableSpec) -> None:
        self._chunk = chunk
        self._spec = spec
        self.value: Tensor | None = None
        count = history_count(spec.rule.kind) if spec.follows_gradients else 0
        self.history = [torch.zeros(chunk.size) for _ in range(count)]
        self.replica: WorkersCopy | EncodedReplica | None = None
        self._unsent: Tensor | None = None  # of a resumed run, until the replica is made
        self._is_shared = False  # whether workers read the value's memory
        self._is_lent = False  # whether messages have the memory of what `saved` returns

    def restore(self, arrays: Sequence[m.Payload]) -> None:
        """Take the workers' first value, and what `saved` returned if a run is resumed.

        Raises:
            RemoteProtocolError: the arrays do not fit.
        """
        name = chunk_name(self._chunk, self._spec)
        most = 1 + len(self.history) + self._spec.has_own_value
        if len(arrays) not in (1, 1 + len(self.history), most):
            raise RemoteProtocolError(f"{name} got {len(arrays) - 1} history arrays")
        if arrays[0].dtype != NUMPY_TYPES[self._spec.held_as]:
            raise RemoteProtocolError(f"{name} got a first value of {arrays[0].dtype}")
        for array in arrays:
            if array.size != self._chunk.size:
                raise RemoteProtocolError(
                    f"{name} has {self._chunk.size} elements; {array.size} came"
                )
        self.value = as_tensor(arrays[0]).to(torch.float32, copy=True)
        for tensor, array in zip(self.history, arrays[1:], strict=False):
            tensor.copy_(as_tensor(array))
        own = as_tensor(arrays[-1]).clone() if len(arrays) > 1 + len(self.history) else None
        if own is not None and self._spec.value_codec is None:
            self.value = own
        else:
            self._unsent = own

    def make_replica(self, precision: Precision) -> None:
        """Keep the workers' value from here on, where the next values travel as
        changes in this precision or by the codec.
        """
        if self.value is None:
            return
        if self._spec.value_codec is not None:
            replaces = self._spec.rule.kind is RuleKind.MEAN
            self.replica = EncodedReplica(
                self.value, self._chunk, self._spec.value_codec, replaces=replaces
            )
            if self._unsent is not None and self.replica.held_back is not None:
                self.replica.held_back.copy_(self._unsent)
            elif self._unsent is not None:
                self.value = self._unsent
            self._unsent = None
        elif precision is not Precision.FLOAT32:
            self.replica = WorkersCopy(self.value, precision)

    def share_value(self, allocate: Callable[[int], Tensor | None]) -> None:
        """Keep the value from here on in memory that a worker of this host reads, where it travels
        as it is and there is some.

        Args:
            allocate: returns such memory for so many numbers, or None.
        """
        if (
            self.value is None
            or self.replica is not None
            or self._spec.adds_changes
            or self._spec.keeping is not Keeping.GRADIENTS
            or self._spec.held_as is not Precision.FLOAT32
        ):
            return
        shared = allocate(self._chunk.size)
        if shared is not None:
            self.value = shared.copy_(self.value)
            self._is_shared = True

    def saved(self) -> list[Tensor]:
        """Return what a snapshot holds besides the workers' value: the history; with
        a codec of values the shard's own, too.

        In place of the value of a mean, which has none of its own: what was not sent of it.
        """
        if self._spec.held_as is not Precision.FLOAT32 and self.value is not None:
            return [*self.history, self.value]
        if not isinstance(self.replica, EncodedReplica) or self.value is None:
            return self.history
        held_back = self.replica.held_back
        return [*self.history, self.value if held_back is None else held_back]

    def lend(self) -> list[Tensor]:
        """Return what `saved` returns; it will not be written to."""
        self._is_lent = True
        return self.saved()

    def _leave_lent(self) -> None:
        """Continue in copies of what messages have."""
        self._is_lent = False
        self.history = [tensor.clone() for tensor in self.history]
        if isinstance(self.replica, EncodedReplica) and self.replica.held_back is not None:
            self.replica.held_back = self.replica.held_back.clone()
        elif self._spec.has_own_value and self.value is not None:
            self.value = self.value.clone()

    def follow(self, pushes: IterationSum, scale: float, clock: int) -> None:
        """Make the next value from the pushes of iteration `clock`, times `scale` if they are
        gradients.
        """
        if self._is_lent:
            self._leave_lent()
        if self._spec.keeping is Keeping.AVERAGE:
            self.value = pushes.average()  # the memory it arrived in becomes the chunk's own
        elif pushes.skipped:
            pass
        elif self._spec.rule.kind is RuleKind.MEAN:
            self._take_mean(pushes, scale)
        else:
            self._update(pushes, scale, clock)

    def _take_mean(self, pushes: IterationSum, scale: float) -> None:
        if self._is_shared and self.value is not None:
            pushes.halves().write_mean(self.value)
        else:
            self.value = pushes.average()
        if scale != 1.0:
            self.value.mul_(scale)

    def _update(self, pushes: IterationSum, scale: float, clock: int) -> None:
        """Apply the rule to the average times `scale`: in one pass if there is one, otherwise tile
        by tile: a tile stays in the cache for all operations. A matrix is one tile.
        """
        assert self.value is not None
        rule, rate = self._spec.rule, pushes.rate
        if scale == 1.0 and update_in_one_pass(
            rule, pushes.halves(), self.history, self.value, rate=rate, step=clock
        ):
            return
        for gradient, value, *history in self._tiles(pushes.average(), self.value, *self.history):
            if scale != 1.0:
                gradient.mul_(scale)
            update(rule, gradient, history, value, rate=rate, step=clock)

    def _tiles(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        if self._chunk.size <= TILE or self._spec.is_whole:
            return iter((tensors,))
        return zip(*(tensor.split(TILE) for tensor in tensors), strict=True)
