"""Agreement on keys between two ends: Noise_IK_25519_ChaChaPoly_SHA256 of the Noise Protocol
Framework, revision 34. Bytes in, bytes out; knows no socket.

Law: the initiator knows the responder's public key, and the responder admits a set of public keys.
Each end proves that it has its secret key. The keys that come out are fresh: both ends add a random
pair of their own, and forget it. They depend on both public keys, on the roles and on every byte of
both messages.

    -> e, es, s, ss     first: 32 bytes in clear, the initiator's public key and its payload sealed
    <- e, ee, se        second: 32 bytes in clear, the responder's payload sealed

Whoever repeats a recorded first message gets a second one, and cannot compute the keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ps_server.errors import RemoteProtocolError

NAME = b"Noise_IK_25519_ChaChaPoly_SHA256"
PROLOGUE = b"poseidon transport 1"
KEY_BYTES = 32
TAG_BYTES = 16
LONGEST_PAYLOAD_BYTES = 16
_ONCE = bytes(12)
"""The nonce of Noise's first message under a key. Every key of this pattern seals one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What both ends have once the handshake is complete.

    Args:
        send: key of what this end sends.
        receive: key of what it receives.
        peer: the other end's public key.
        payload: what the other end has said in the handshake.
    """

    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)
    peer: bytes
    payload: bytes


class _Transcript:
    """Noise's SymmetricState: a hash of all that was said, and the key that follows from it."""

    def __init__(self, prologue: bytes, responder: bytes) -> None:
        self._hash = self._chain = NAME
        self._key = b""
        for known in (prologue, responder):
            self.mix_hash(known)

    def mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def mix_key(self, own: X25519PrivateKey, other: bytes) -> None:
        try:
            shared = own.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:  # a point of low order: everybody knows the result
            raise RemoteProtocolError("a handshake has a public key that is none") from error
        self._chain, self._key = _derive(self._chain, shared)

    def seal(self, plain: bytes) -> bytes:
        sealed = ChaCha20Poly1305(self._key).encrypt(_ONCE, plain, self._hash)
        self.mix_hash(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        try:
            plain = ChaCha20Poly1305(self._key).decrypt(_ONCE, sealed, self._hash)
        except InvalidTag:
            raise RemoteProtocolError("a handshake is not from the expected peer") from None
        self.mix_hash(sealed)
        return plain

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys from the initiator to the responder, and back."""
        return _derive(self._chain, b"")


class Initiator:
    """The end that connects.

    Args:
        secret: its secret key.
        expect: the public key of the other end.
        payload: what it says in the first message, at most `LONGEST_PAYLOAD_BYTES`.
        prologue: what both ends know besides.
        ephemeral: its random secret key; None: a new one.
    """

    def __init__(
        self,
        secret: bytes,
        expect: bytes,
        payload: bytes,
        *,
        prologue: bytes = PROLOGUE,
        ephemeral: bytes | None = None,
    ) -> None:
        self._static = X25519PrivateKey.from_private_bytes(secret)
        self._ephemeral = _ephemeral(ephemeral)
        self._expect = expect
        self._prologue = prologue
        self._payload = payload
        self.first, _ = self._say()
        """The first message."""

    def _say(self) -> tuple[bytes, _Transcript]:
        transcript = _Transcript(self._prologue, self._expect)
        own = _public(self._ephemeral)
        transcript.mix_hash(own)
        transcript.mix_key(self._ephemeral, self._expect)
        static = transcript.seal(_public(self._static))
        transcript.mix_key(self._static, self._expect)
        return own + static + transcript.seal(self._payload), transcript

    def finish(self, second: bytes) -> Agreement:
        """Read the second message. One that is refused changes nothing.

        Raises:
            RemoteProtocolError: it is not from the expected end, or answers another message.
        """
        _check_length(second, KEY_BYTES)
        _, transcript = self._say()
        other, sealed = second[:KEY_BYTES], second[KEY_BYTES:]
        transcript.mix_hash(other)
        transcript.mix_key(self._ephemeral, other)
        transcript.mix_key(self._static, other)
        payload = transcript.open(sealed)
        send, receive = transcript.split()
        return Agreement(send=send, receive=receive, peer=self._expect, payload=payload)


def respond(
    secret: bytes,
    first: bytes,
    admit: Collection[bytes],
    answer: Callable[[bytes], bytes],
    *,
    prologue: bytes = PROLOGUE,
    ephemeral: bytes | None = None,
) -> tuple[bytes, Agreement]:
    """Read a first message, and return the second one and the responder's keys.

    Args:
        secret: the responder's secret key.
        first: what the initiator has said.
        admit: public keys of initiators.
        answer: makes the second message's payload from the first one's.
        prologue: what both ends know besides.
        ephemeral: the responder's random secret key; None: a new one.

    Raises:
        RemoteProtocolError: it is not from an initiator to admit, or for another responder.
    """
    _check_length(first, 2 * KEY_BYTES + TAG_BYTES)
    static = X25519PrivateKey.from_private_bytes(secret)
    transcript = _Transcript(prologue, _public(static))
    other, rest = first[:KEY_BYTES], first[KEY_BYTES:]
    transcript.mix_hash(other)
    transcript.mix_key(static, other)
    peer = transcript.open(rest[: KEY_BYTES + TAG_BYTES])
    if peer not in admit:
        raise RemoteProtocolError("a handshake is from a key that is not one of this job")
    transcript.mix_key(static, peer)
    payload = transcript.open(rest[KEY_BYTES + TAG_BYTES :])
    own = _ephemeral(ephemeral)
    said = _public(own)
    transcript.mix_hash(said)
    transcript.mix_key(own, other)
    transcript.mix_key(own, peer)
    second = said + transcript.seal(answer(payload))
    receive, send = transcript.split()
    return second, Agreement(send=send, receive=receive, peer=peer, payload=payload)


def _check_length(message: bytes, before_payload: int) -> None:
    if not 0 <= len(message) - before_payload - TAG_BYTES <= LONGEST_PAYLOAD_BYTES:
        raise RemoteProtocolError(f"a handshake has {len(message)} bytes")


def _derive(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Return two keys: HKDF with SHA-256, as Noise uses it."""
    extracted = hmac.digest(chain, secret, "sha256")
    one = hmac.digest(extracted, b"\x01", "sha256")
    return one, hmac.digest(extracted, one + b"\x02", "sha256")


def _ephemeral(secret: bytes | None) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret) if secret else X25519PrivateKey.generate()


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()
