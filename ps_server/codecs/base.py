"""The contract of a codec, and the operations that all codecs have.

Laws of a codec:

* The encoded size follows from the number of elements alone, and is a multiple of 4. What is sent
  of a segment follows from its elements and its key alone.
* Bits follow from the numbers alone: no reduction depends on threads, alignment or vector width,
  and of equal magnitudes the one with the lower position is sent.
* Encoded bytes are checked before they are used: whatever a peer sends, `add` and `decode` stay
  within their arrays.
* A number that is not finite arrives as one that is not finite, or not at all.

Laws of the operations:

* What a receiver adds is what the sender subtracts from what it holds back, to the bit. So the sum
  of what was sent and of what is held back is the sum of what was given, up to the rounding of
  float32 sums.
* A compiled codec (`ps_server.native`) has the same bits as the class, but for the payload of a
  NaN; it does in one pass over memory what torch takes six for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps_server import native

SEGMENT_ELEMENTS = 16 * 1024
"""Tables with a codec are cut into chunks at multiples of this: a codec treats each segment by
itself.
"""
ALIGNMENT = 4

Array = NDArray[np.float32]
Encoded = NDArray[np.uint8]


class Key(NamedTuple):
    """What sender and receiver both know of the elements, such as to draw the same numbers.

    Attributes:
        table: the number of the table, from 0.
        segment: the number in the table of the first segment, from 0.
        clock: the iteration.
    """

    table: int
    segment: int
    clock: int


@dataclass(frozen=True)
class Codec(ABC):
    """One codec with its parameters: codecs of the same text are equal.

    A codec has a `name`, `size`, `encode` and `decode`. It overrides `check` if not all bytes are
    legal, and `add` if it sends some elements only. Its parameters are fields (int or float) of a
    frozen dataclass: `topk:0.01` is `TopK(0.01)`. `__post_init__` refuses values with `SpecError`.
    """

    name: ClassVar[str]
    """As in `--compress`; also of the compiled codec, where there is one."""

    def __str__(self) -> str:
        return ":".join([self.name, *(repr(getattr(self, one.name)) for one in fields(self))])

    @abstractmethod
    def size(self, elements: int) -> int:
        """Return the bytes of so many elements, a multiple of 4."""

    @abstractmethod
    def encode(self, exact: Array, out: Encoded, key: Key) -> None:
        """Write `exact`, n elements, to `out` as well as the codec can: all `size(n)` bytes."""

    @abstractmethod
    def decode(self, encoded: Encoded, out: Array, key: Key) -> None:
        """Write the encoded numbers to `out`. `check` has passed."""

    def check(self, encoded: Encoded, elements: int) -> None:  # noqa: B027 - any bytes of the right number are legal
        """Check bytes of a peer. Their number is right.

        Raises:
            RemoteProtocolError: no encoder makes them.
        """

    def add(self, out: Array, encoded: Encoded, key: Key, *, sign: int = 1) -> None:
        """Add the encoded numbers to `out`, or subtract them (sign -1). `check` has passed."""
        decoded = np.empty_like(out)
        self.decode(encoded, decoded, key)
        (np.add if sign > 0 else np.subtract)(out, decoded, out=out)

    def sent(self, elements: int) -> tuple[int, int]:
        """Return the elements that are sent of a whole segment, and of a shorter last one, where
        these are not all. Only a compiled codec asks.
        """
        return 0, 0


class Coder:
    """What workers and shards do with a codec. Encoded arrays have `size(n)` bytes, the others n
    elements of float32.

    Args:
        codec: the codec.
        library: the compiled code, which has a codec of the same name or not; None: there is none.
    """

    def __init__(self, codec: Codec, library: native.Library | None = native.LIBRARY) -> None:
        self.codec = codec
        self._twin = None if library is None else library.twin(codec.name)
        self.size = codec.size
        self.check = codec.check

    def compress(self, left: Array, given: Array, out: Encoded, key: Key) -> None:
        """Write `left` + `given` to `out` as well as the codec can; leave the rest in `left`."""
        if self._twin is not None and native.fits(left, given, out):
            self._twin.compress(left, given, out, self._part(left.size, key))
            return
        np.add(left, given, out=left)
        self.codec.encode(left, out, key)
        self.codec.add(left, out, key, sign=-1)

    def follow(self, own: Array, value: Array, out: Encoded, key: Key) -> None:
        """Write the change from `own` to `value` to `out` as well as the codec can; apply it."""
        if self._twin is not None and native.fits(own, value, out):
            self._twin.follow(own, value, out, self._part(own.size, key))
            return
        self.codec.encode(value - own, out, key)
        self.codec.add(own, out, key)

    def add(self, out: Array, encoded: Encoded, key: Key) -> None:
        """Add the encoded numbers to `out`. `check` has passed."""
        if self._twin is not None and native.fits(out, encoded):
            self._twin.add(out, encoded, self._part(out.size, key))
            return
        self.codec.add(out, encoded, key)

    def average(self, out: Array, pushes: Sequence[Encoded], key: Key) -> None:
        """Write the mean of what workers have encoded to `out`: 0 + the first + the second ...,
        divided by their number. `check` has passed.
        """
        if self._twin is not None and native.fits(out, *pushes):
            self._twin.average(out, pushes, self._part(out.size, key))
            return
        out.fill(0.0)
        for encoded in pushes:
            self.codec.add(out, encoded, key)
        if len(pushes) > 1:
            np.divide(out, np.float32(len(pushes)), out=out)

    def _part(self, elements: int, key: Key) -> native.Part:
        return native.Part(elements, *self.codec.sent(elements), *key)


def aligned(size: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT
