"""Pushes that are rounded or encoded on the device of the gradients, before they are copied to the
host: at most half of the bytes of float32.

Laws:

* What is sent and what is held back has the bits of `ps_server.protocol.precision`, but for the
  payload of a NaN. So denormal numbers are zeros here, too.
* No operation waits for the device, or divides by a Python number (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ps_server import Precision, StoreSpec, TableSpec
from ps_server.codecs.base import SEGMENT_ELEMENTS
from ps_server.codecs.blocks import BlockCodec
from ps_server.codecs.segments import Drawn, Largest, RandomK, SegmentCodec, TopK
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import TORCH_TYPES, bounds, key_of, of_pushes, round_into

SMALLEST_NORMAL = 2.0**-126


class DeviceEncoder:
    """Rounds or encodes one table's pushes, and adds what was not sent to the next one.

    Args:
        chunks: its chunks, in order.
        how: its codec, or the precision of the wire.
        device: of the gradients.

    Attributes:
        held_back: the sum of all that was given, less all that was sent.
        codec: None where pushes are rounded.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        how: BlockCodec | SegmentCodec | Precision,
        device: torch.device,
    ) -> None:
        size = sum(chunk.size for chunk in chunks)
        self.held_back = torch.zeros(size, dtype=torch.float32, device=device)
        self.codec = None if isinstance(how, Precision) else how
        self._chunks = chunks
        self._choosers: list[Largest | Drawn] = []
        if isinstance(how, Precision):
            self._sent = torch.empty(size, dtype=TORCH_TYPES[how], device=device)
            return
        self._sent = torch.zeros(bounds(chunks, how)[-1], dtype=torch.uint8, device=device)
        if isinstance(how, SegmentCodec):
            key = key_of(chunks[0], 0)
            for rows, length, sent in how.parts(size):
                self._choosers.append(how.chooser((rows, length), sent, key, device))
                key = key._replace(segment=key.segment + rows)

    def encode(self, gradient: Tensor, clock: int) -> Tensor:
        """Return what to send in place of a flat gradient, chunk after chunk, in memory that is used
        for the next. All work runs on the current stream.

        Args:
            clock: of the push.
        """
        left = self.held_back
        left.add_(gradient * _is_normal(gradient))
        left.mul_(_is_normal(left))
        if self.codec is None:
            round_into(self._sent, left)
            left.sub_(self._sent)
        elif isinstance(self.codec, BlockCodec):
            self._lay_out(*self.codec.compress_whole(left))
        else:
            self._lay_out(*self._choose(left, clock))
        left.mul_(_is_normal(left))
        return self._sent

    def _choose(self, left: Tensor, clock: int) -> tuple[Tensor, Tensor]:
        """Return positions and values of the elements to send, which `left` then has no more."""
        whole = left.numel() // SEGMENT_ELEMENTS * SEGMENT_ELEMENTS
        parts = (left[:whole].view(-1, SEGMENT_ELEMENTS), left[whole:].view(1, -1))
        chosen, values = [], []
        for rows, choose in zip(
            (rows for rows in parts if rows.numel()), self._choosers, strict=True
        ):
            at = choose(rows, clock)
            value = rows.gather(1, at)
            rows.scatter_(1, at, value - value)  # NaN of what is not finite, as on the host
            chosen.append(at.to(torch.int16).view(-1))
            values.append(value.view(-1))
        return torch.cat(chosen), torch.cat(values)

    def _lay_out(self, heads: Tensor, bodies: Tensor) -> None:
        """Write the two parts of what a codec sends as the bytes of each chunk. Neighbours of one
        size are written together.
        """
        assert self.codec is not None
        codec, sent, bodies = self.codec, self._sent, bodies.view(torch.uint8)
        heads, at, first, place = heads.view(torch.uint8), 0, 0, 0
        for size, run in groupby(chunk.size for chunk in self._chunks):
            count, whole = len(list(run)), codec.size(size)
            if isinstance(codec, BlockCodec):
                head, body = 4 * -(-size // codec.shared), -(-size * codec.bits // 8)
            else:
                body = 4 * codec.count(size)
                head = body // 2 if isinstance(codec, TopK) else 0
            rows = sent[place : place + count * whole].view(count, whole)
            start = head if isinstance(codec, BlockCodec) else whole - body
            rows[:, :head].copy_(heads[at : at + count * head].view(count, head))
            rows[:, start : start + body].copy_(
                bodies[first : first + count * body].view(count, body)
            )
            at, first, place = at + count * head, first + count * body, place + count * whole


def device_encoders(
    store: StoreSpec, table: TableSpec, chunks: Sequence[Chunk], host: int, device: torch.device
) -> list[DeviceEncoder]:
    """Return what encodes the pushes to a table of gradients, one for each virtual worker of a host;
    none where they are sent as they are, or the host encodes them: changes (staleness > 0), and
    codecs of users.
    """
    if table.staleness or table.held_as is not Precision.FLOAT32 or not store.is_lossy(table):
        return []
    how = table.gradient_codec or of_pushes(store, table)
    if how is Precision.FLOAT32 or not isinstance(how, BlockCodec | TopK | RandomK | Precision):
        return []
    return [DeviceEncoder(chunks, how, device) for _ in store.nodes(table, host)]


def _is_normal(numbers: Tensor) -> Tensor:
    """Return 1 for each number that stays, and 0 for denormal ones, which become a zero of their
    sign.
    """
    return numbers.abs().ge_(SMALLEST_NORMAL)
