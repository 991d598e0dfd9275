"""Encryption of what a launcher and an actor of Ray send each other: X25519, then ChaCha20-Poly1305.

Ray's own connections are in the clear unless the cluster has TLS. Each side makes a key pair for
one connection, and Ray carries the public keys only.

Law: messages of a direction are opened in the order in which they were sealed, each once; any other
is refused.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_KEY_BYTES = 32


class SealError(Exception):
    """A message was changed, repeated, lost, or sealed with other keys."""


class Seal:
    """One direction of a channel.

    Args:
        key: 32 bytes, of this direction alone.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._number = 0

    def seal(self, message: bytes) -> bytes:
        return self._cipher.encrypt(self._nonce(), message, None)

    def open(self, sealed: bytes) -> bytes:
        """Return a message that was sealed.

        Raises:
            SealError: it is not the next message of this direction.
        """
        try:
            return self._cipher.decrypt(self._nonce(), sealed, None)
        except InvalidTag as error:
            raise SealError("a message was changed, repeated or lost on its way") from error

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "big")


class ChannelKeys:
    """The key pair of one side of one connection."""

    def __init__(self) -> None:
        self._own = X25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        """The public key, for the other side."""
        return self._own.public_key().public_bytes_raw()

    def seals(self, other: bytes) -> tuple[Seal, Seal]:
        """Return the seals of the connection: for what this side sends, and for what it receives.

        Raises:
            SealError: the other side's key is not a public key.
        """
        try:
            shared = self._own.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise SealError("the other side's key is not a public key") from error
        first, second = sorted((self.public, other))
        info = b"poseidon ray 1, " + first + second
        material = HKDF(
            algorithm=hashes.SHA256(), length=2 * _KEY_BYTES, salt=None, info=info
        ).derive(shared)
        keys = (material[:_KEY_BYTES], material[_KEY_BYTES:])
        send, receive = keys if self.public == first else keys[::-1]
        return Seal(send), Seal(receive)
