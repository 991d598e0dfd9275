"""Fewer bits on the wire, float32 everywhere else, with error feedback: 16 bits, or the codec of
a table (`ps_server.codecs`).

Laws, where a store's precision is float16 or bfloat16, for tables without a codec:

* Gradients and changes (`Push`): the worker rounds what it sends, keeps what rounding has lost, and
  adds that to what it sends next (error feedback: Seide et al., Interspeech 2014; Karimireddy et
  al., ICML 2019). So after any number of iterations the shards have received the sum of what was
  pushed, but for one rounding.
* Values of staleness 0 (`Value`): the first is float32. After it the shard sends the change since
  the last value, rounded, and adds the same rounded numbers to its copy of the workers' value. The
  next change is taken from that copy, which is the same feedback: the workers' value never drifts
  from the shard's, is as close to it as one rounding of one change, not of the value, and has the
  same bits on every worker.
* In float32 stay: first values and history, values of staleness > 0 (each worker gets them at
  another moment), values that are sent on request (`SSP`: changes between two requests would be
  missed), changes that are held back and added up (`SSPAggr`), averaged tables, and copies.
* float16 ends at 65,504: a larger number is sent as that, and the rest with the next push.

Tables that workers hold in 16 bits (`TableSpec.held_as`) need no feedback: the workers' gradients
are of that type, and the shard sends its value, rounded.

A table with a codec has the same laws for pushes and values. Values that replace the ones before
(`RuleKind.MEAN`: mean gradients, for optimizers that run on the workers) are encoded as pushes are:
each with what was held back before.

On the wire and in messages a bfloat16 array is numpy's uint16, as numpy has no such type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ps_server.codecs.base import SEGMENT_ELEMENTS, Codec, Coder, Encoded, Key
from ps_server.protocol.messages import Array, Payload
from ps_server.protocol.placement import Chunk
from ps_server.protocol.settings import Consistency, Keeping, Precision, StoreSpec, TableSpec

TILE = 64 * 1024
LARGEST_FLOAT16 = 65_504.0

NUMPY_TYPES: dict[Precision, np.dtype[np.generic]] = {
    Precision.FLOAT32: np.dtype("<f4"),
    Precision.FLOAT16: np.dtype("<f2"),
    Precision.BFLOAT16: np.dtype("<u2"),
}
TORCH_TYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.FLOAT16: torch.float16,
    Precision.BFLOAT16: torch.bfloat16,
}


def pushed_in(precision: Precision, consistency: Consistency, staleness: int) -> Precision:
    """Return the precision of gradients or changes on the wire; changes that
    are added up first need all their digits.
    """
    added_up = staleness > 0 and consistency is Consistency.SSP_AGGR
    return Precision.FLOAT32 if added_up else precision


def sent_in(precision: Precision, consistency: Consistency, staleness: int) -> Precision:
    """Return the precision of values on the wire, after the first: they are
    changes of the last ones unless it is float32.
    """
    changes = staleness == 0 and consistency is not Consistency.SSP
    return precision if changes else Precision.FLOAT32


def of_pushes(store: StoreSpec, table: TableSpec) -> Precision:
    """Return the precision of a table's gradients or changes on the wire, if it has no codec."""
    if table.held_as is not Precision.FLOAT32:
        return table.held_as
    if table.keeping is not Keeping.GRADIENTS:
        return Precision.FLOAT32
    return pushed_in(store.precision, store.consistency, table.staleness)


def of_values(store: StoreSpec, table: TableSpec) -> Precision:
    """Return the precision of a table's values on the wire, after the first, if
    it has no codec: changes unless float32.
    """
    if not table.follows_gradients:
        return Precision.FLOAT32
    return sent_in(store.precision, store.consistency, table.staleness)


def as_tensor(array: Payload) -> Tensor:
    """Return a tensor of the type that an array has on the wire, over its memory; over a copy
    where that is read-only.

    torch warns about read-only memory. Arrays that came through a socket are writable.
    """
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> Payload:
    """Return the array of a tensor: the inverse of `as_tensor`."""
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(np.uint16))
    return np.asarray(tensor.numpy())


def rounded(value: Tensor, precision: Precision) -> Tensor:
    """Return a value as workers hold it: the tensor itself, or a copy of 16 bits."""
    return value.to(TORCH_TYPES[precision])


def empty(size: int, precision: Precision) -> Tensor:
    """Return memory for so many numbers of the wire's type."""
    return torch.empty(size, dtype=TORCH_TYPES[precision])


def add(out: Array, change: Payload) -> None:
    """Add a change to an array of float32, in float32: the same bits wherever it is done."""
    torch.from_numpy(out).add_(as_tensor(change))


def round_into(out: Tensor, exact: Tensor) -> None:
    """Round float32 to the type of `out`, of the same size."""
    if out.dtype == torch.float16:
        exact = exact.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16)
    out.copy_(exact)


class Feedback:
    """Rounds one table's pushes, and adds what rounding has lost to the next one.

    Args:
        size: elements of the table.
        precision: of the wire; not FLOAT32.
        reuse: whether the memory of one push may be used for the next: it has no other user by
            then.
    """

    __slots__ = ("_precision", "_rounded", "left")

    def __init__(self, size: int, precision: Precision, *, reuse: bool) -> None:
        self.left = torch.zeros(size, dtype=torch.float32, device="cpu")
        self._precision = precision
        self._rounded = empty(size, precision) if reuse else None

    def round(self, array: Array) -> Payload:
        """Return what to send in place of `array`."""
        rounded = self._rounded if self._rounded is not None else empty(array.size, self._precision)
        tiles = (tensor.split(TILE) for tensor in (torch.from_numpy(array), self.left, rounded))
        for exact, left, out in zip(*tiles, strict=True):
            left.add_(exact)
            round_into(out, left)
            left.sub_(out)
        return as_array(rounded)


class WorkersCopy:
    """The workers' value of one chunk, on the shard; makes the changes that update it.

    Args:
        value: the first value, which the workers get in float32.
        precision: of the wire; not FLOAT32.
    """

    __slots__ = ("change", "value")

    def __init__(self, value: Tensor, precision: Precision) -> None:
        self.value = value.clone()
        self.change = empty(value.numel(), precision)
        """The last change, as it is sent; its memory is used for the next."""

    def follow(self, value: Tensor, clock: int) -> None:
        """Make the change towards `value` of any iteration, and apply it."""
        tiles = (tensor.split(TILE) for tensor in (value, self.value, self.change))
        for exact, own, change in zip(*tiles, strict=True):
            round_into(change, exact - own)
            own.add_(change)


def key_of(chunk: Chunk, clock: int) -> Key:
    """Return the key of a chunk in an iteration."""
    return Key(chunk.table, chunk.start // SEGMENT_ELEMENTS, clock)


class Compressor:
    """Encodes one table's pushes on a worker, and adds what was not sent to the next one.

    Args:
        chunks: its chunks, in order.
        codec: its codec.
    """

    def __init__(self, chunks: Sequence[Chunk], codec: Codec) -> None:
        self.held_back: Array = np.zeros(sum(chunk.size for chunk in chunks), np.float32)
        """The sum of all that was given, less all that was sent."""
        self._chunks = chunks
        self._coder = Coder(codec)
        self.bounds = bounds(chunks, codec)
        """Where the bytes of each chunk begin in an encoded push; at last their number."""
        self._out: Encoded = np.zeros(self.bounds[-1], np.uint8)

    def encode(self, array: Array, clock: int) -> Encoded:
        """Return what to send in place of `array` in an iteration, chunk after
        chunk. Its memory is used for the next.
        """
        for chunk, start, stop in zip(self._chunks, self.bounds, self.bounds[1:], strict=False):
            own = slice(chunk.start, chunk.stop)
            out, key = self._out[start:stop], key_of(chunk, clock)
            self._coder.compress(self.held_back[own], array[own], out, key)
        return self._out


def bounds(chunks: Sequence[Chunk], codec: Codec) -> list[int]:
    """Return `Compressor.bounds`."""
    found = [0]
    for chunk in chunks:
        found.append(found[-1] + codec.size(chunk.size))
    return found


class EncodedReplica:
    """The workers' value of one chunk, on the shard; encodes the changes that update it.

    Args:
        value: the first value, which the workers get in float32.
        chunk: its chunk.
        codec: of its table.
        replaces: whether a value replaces the one before (`RuleKind.MEAN`) and is not a sum of
            changes: then the workers' value is what the last encoding holds, and what was not sent
            is added to the next value.
    """

    __slots__ = ("_chunk", "_coder", "change", "held_back", "value")

    def __init__(self, value: Tensor, chunk: Chunk, codec: Codec, *, replaces: bool) -> None:
        self.value = value.clone()
        self.change = torch.zeros(codec.size(chunk.size), dtype=torch.uint8)
        """The last change, as it is sent; its memory is used for the next."""
        self.held_back = torch.zeros_like(self.value) if replaces else None
        """What was not sent of values that replace the ones before; None where values are sums
        of changes.
        """
        self._chunk = chunk
        self._coder = Coder(codec)

    def follow(self, value: Tensor, clock: int) -> None:
        """Encode the change towards `value` in an iteration, and apply it."""
        encoded, key = self.change.numpy(), key_of(self._chunk, clock)
        own, exact = self.value.numpy(), value.numpy()
        if self.held_back is None:
            self._coder.follow(own, exact, encoded, key)
        else:
            self._coder.compress(self.held_back.numpy(), exact, encoded, key)
            self._coder.average(own, [encoded], key)
