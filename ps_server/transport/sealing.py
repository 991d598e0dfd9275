"""Sealed packets: frames in, sealed parts out, and back. One end of one connection; knows no
socket.

Law: each direction has a key of its own, and each packet the next number of its direction. Whatever
is opened was sealed by the other end of this connection, as the packet after the one before, whole.
A part that was changed, repeated, left out, or comes from elsewhere is refused, and changes
nothing.

A packet is a sequence of parts:

    number      8 bytes, in clear
    large part  each frame of `LARGE_BYTES` or more, sealed by itself
    ...
    lead        the lengths of all frames, then all smaller frames, each at the next multiple of
                `ALIGNMENT`, sealed

The nonce of a part is its place in the packet (lead 0, large parts from 1 on) and the packet's
number; packet number and number of parts are associated data. A key seals at most `REKEY_BYTES` and
one packet, then both ends replace it by Noise's REKEY.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from enum import Enum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from ps_server.errors import PacketsMissing, RemoteProtocolError
from ps_server.transport.base import Buffer, Frames

LARGE_BYTES = 64 * 1024
"""A smaller frame is copied into the lead: that costs less than a part of its own."""
ALIGNMENT = 8
"""Of frames in the lead: arrays begin at whole elements."""
TAG_BYTES = 16
REKEY_BYTES = 2**36
"""64 GiB, 2^32 blocks of AES. TLS 1.3 allows AES-GCM 2^34.5 blocks a key, so that an attacker's
advantage stays below 2^-60 (RFC 8446, 5.5).
"""
MOST_FRAMES = 16_384
"""Most frames of a packet; the protocols above allow half as many."""
OVERDUE_LOOKS = 20
"""Five seconds, where a transport looks."""
_NUMBER = struct.Struct(">Q")
_NONCE = struct.Struct(">IQ")
_BOUND = struct.Struct(">QI")
_COUNT = struct.Struct("<I")
_REKEY_NONCE = b"\0" * 4 + b"\xff" * 8
"""Noise's: no packet has this number."""


class Suite(Enum):
    """How packets are sealed."""

    AES_256_GCM = 1
    """Where both processors have an instruction for AES."""
    CHACHA20_POLY1305 = 2
    """Elsewhere: three times as fast there, and without tables that a cache would give away."""


_CIPHERS: dict[Suite, Callable[[bytes], AESGCM | ChaCha20Poly1305]] = {
    Suite.AES_256_GCM: AESGCM,
    Suite.CHACHA20_POLY1305: ChaCha20Poly1305,
}


def offer(*, has_aes: bool) -> bytes:
    """Return the suites of an end, as the handshake carries them."""
    first = [Suite.AES_256_GCM] if has_aes else []
    return bytes(suite.value for suite in (*first, Suite.CHACHA20_POLY1305))


def choose(offered: bytes, *, has_aes: bool) -> Suite:
    """Return the suite to use with an end that offers these."""
    own = offer(has_aes=has_aes)
    return next((Suite(value) for value in own if value in offered), Suite.CHACHA20_POLY1305)


class _Direction:
    """The key of one direction, and the number of its next packet.

    Args:
        suite: the agreed one.
        key: of this direction, 32 bytes.
        rekey_bytes: after how many bytes the key is replaced.
    """

    def __init__(self, suite: Suite, key: bytes, rekey_bytes: int = REKEY_BYTES) -> None:
        self._suite = suite
        self._rekey_bytes = rekey_bytes
        self._number = 0
        self._renew(key)

    def _renew(self, key: bytes) -> None:
        self._cipher = _CIPHERS[self._suite](key)
        self._used = 0

    def _passed(self, sealed_bytes: int) -> None:
        """Count a packet."""
        self._number += 1
        self._used += sealed_bytes
        if self._used >= self._rekey_bytes:
            self._renew(self._next_key)

    @property
    def _next_key(self) -> bytes:
        return self._cipher.encrypt(_REKEY_NONCE, bytes(32), b"")[:32]


class Sealer(_Direction):
    """Seals what this end sends."""

    @property
    def number(self) -> bytes:
        """The first part of the next packet."""
        return _NUMBER.pack(self._number)

    def seal(self, frames: Frames, take: Callable[[int], memoryview]) -> list[memoryview]:
        """Seal the next packet, and return its parts after the number.

        What it returns must be sent: the number is not used again.

        Args:
            frames: are not changed.
            take: returns memory of a size.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        large = [view for view in views if view.nbytes >= LARGE_BYTES]
        bound = _BOUND.pack(self._number, len(large) + 2)
        parts = []
        for place, view in enumerate(large, 1):
            part = take(view.nbytes + TAG_BYTES)
            nonce = _NONCE.pack(place, self._number)
            self._cipher.encrypt_into(nonce, view, bound, part)
            parts.append(part)
        lead = _lead(views, take)
        nonce = _NONCE.pack(0, self._number)
        self._cipher.encrypt_into(nonce, lead[:-TAG_BYTES], bound, lead)
        parts.append(lead)
        self._passed(sum(part.nbytes for part in parts))
        return parts

    def packet(self, frames: Frames) -> list[memoryview]:
        """Seal the next packet, and return all its parts, in new memory."""
        number = memoryview(bytearray(self.number))
        return [number, *self.seal(frames, lambda size: memoryview(bytearray(size)))]


class Opener(_Direction):
    """Opens what the other end has sealed."""

    _looks = 0  # since a packet was refused, and none was opened after it

    def is_overdue(self) -> bool:
        """Return whether a packet was refused `OVERDUE_LOOKS` calls ago, and none has come since.
        It was not added to the others, then, but was one of them, and both ends may wait for ever.
        """
        self._looks += bool(self._looks)
        return self._looks > OVERDUE_LOOKS

    def open(self, parts: Sequence[memoryview]) -> list[Buffer]:
        """Open a packet in place, and return its frames: views of the parts.

        Args:
            parts: memory that may be written to.

        Raises:
            PacketsMissing: it was sealed by the other end, but earlier ones did not come.
            RemoteProtocolError: it was not, was changed, or came before. The parts are spoilt.
        """
        self._looks = self._looks or 1
        if not 2 <= len(parts) <= MOST_FRAMES + 2 or parts[0].nbytes != _NUMBER.size:
            raise RemoteProtocolError("a packet is not a sealed one")
        (number,) = _NUMBER.unpack(parts[0])
        if number < self._number:
            raise RemoteProtocolError(f"packet {number} has come before")
        bound = _BOUND.pack(number, len(parts))
        if number > self._number:
            self._check_later(parts[-1], _NONCE.pack(0, number), bound)
            raise PacketsMissing(f"packet {self._number} is missing")
        lead = self._open(parts[-1], _NONCE.pack(0, number), bound)
        large = [
            self._open(part, _NONCE.pack(place, number), bound)
            for place, part in enumerate(parts[1:-1], 1)
        ]
        try:
            frames = _frames(lead, large)
        except (struct.error, StopIteration):
            raise RemoteProtocolError("a packet has other frames than its lead says") from None
        self._passed(sum(part.nbytes for part in parts[1:]))
        self._looks = 0
        return frames

    def _check_later(self, lead: memoryview, nonce: bytes, bound: bytes) -> None:
        """Check that a later packet is from the other end, which may have replaced its key since.

        Raises:
            RemoteProtocolError: it is not.
        """
        for cipher in (self._cipher, _CIPHERS[self._suite](self._next_key)):
            with contextlib.suppress(InvalidTag):
                cipher.decrypt(nonce, lead, bound)
                return
        raise RemoteProtocolError("a packet was not sealed by the other end")

    def _open(self, part: memoryview, nonce: bytes, bound: bytes) -> memoryview:
        if part.nbytes < TAG_BYTES:
            raise RemoteProtocolError("a part of a packet is cut off")
        plain = part[:-TAG_BYTES]
        try:
            self._cipher.decrypt_into(nonce, part, bound, plain)
        except InvalidTag:
            raise RemoteProtocolError("a packet was not sealed by the other end") from None
        return plain


def _lead(frames: Sequence[memoryview], take: Callable[[int], memoryview]) -> memoryview:
    """Return a lead that is not sealed yet, with room for its tag."""
    layout = struct.pack(f"<I{len(frames)}I", len(frames), *(frame.nbytes for frame in frames))
    small = [frame for frame in frames if frame.nbytes < LARGE_BYTES]
    end = _aligned(len(layout))
    lead = take(end + sum(_aligned(frame.nbytes) for frame in small) + TAG_BYTES)
    lead[: len(layout)] = layout
    for frame in small:
        lead[end : end + frame.nbytes] = frame
        end += _aligned(frame.nbytes)
    return lead


def _frames(lead: memoryview, large: Sequence[memoryview]) -> list[Buffer]:
    """Return the frames of an opened packet."""
    (count,) = _COUNT.unpack_from(lead)
    lengths = struct.unpack_from(f"<{count}I", lead, _COUNT.size)
    frames: list[Buffer] = []
    end, whole = _aligned(_COUNT.size * (count + 1)), iter(large)
    for length in lengths:
        if length >= LARGE_BYTES:
            frames.append(next(whole))
        else:
            frames.append(lead[end : end + length])
            end += _aligned(length)
    return frames


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
