"""What each client asks of Ray's nodes.

Law: pure. A client has a node of its own; a resource is a number, as in `ray start --resources`.

Encryption of what a launcher and an actor of Ray send each other: X25519, then ChaCha20-Poly1305.

Ray's own connections are in the clear unless the cluster has TLS. Each side makes a key pair for
one connection, and Ray carries the public keys only.

Law: messages of a direction are opened in the order in which they were sealed, each once; any other
is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from poseidon.errors import UsageError, counted

ANY = "any"
"""The address, in a machinefile, of a client that any node may have."""
NODE_SHARE = 0.001
"""Part of the resource `node:<address>`, which Ray gives each node, that a client takes of its
node.
"""
SMALLEST = 0.0001
"""The smallest amount of a resource that Ray counts."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}", re.ASCII)
_HIDDEN = re.compile(r"(object_store_)?memory$|node:|.*_group_(\d+_)?[0-9a-f]{20,}$")

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of the cluster.

    Attributes:
        id: Ray's.
        address: its IP address.
        name: of its host.
        resources: all that it has, in use or not.
    """

    id: str
    address: str
    name: str
    resources: Resources


def parse_resources(text: str, flag: str) -> dict[str, float]:
    """Parse `CPU=4+trainer=1`.

    Args:
        text: the flag's value; empty: none.
        flag: its name, for the error.

    Raises:
        UsageError: not names with numbers of at least 0, amounts that Ray does not take, or a name
            twice.
    """
    found: dict[str, float] = {}
    for part in filter(None, text.split("+")):
        name, _, amount = (piece.strip() for piece in part.partition("="))
        try:
            number = float(amount)
        except ValueError:
            number = math.nan
        if not _NAME.fullmatch(name) or not 0 <= number < math.inf:
            raise UsageError(
                f"{flag}: expected NAME=NUMBER with + between, as in CPU=4+trainer=1, found '{part}'"
            )
        if name in found:
            raise UsageError(f"{flag}: '{name}' is given twice")
        if 0 < number < SMALLEST or (name == "GPU" and number > 1 and number != int(number)):
            raise UsageError(
                f"{flag}: Ray has no such amount as '{part}'; expected at least {SMALLEST}, and "
                "whole GPUs above 1"
            )
        found[name] = number
    return found


def format_resources(resources: Resources) -> str:
    """Return `CPU=2, GPU=1`, as a user writes them."""
    return (
        ", ".join(f"{name}={amount:g}" for name, amount in sorted(resources.items())) or "nothing"
    )


def pinned(resources: Resources, address: str, nodes: Iterable[RayNode]) -> dict[str, float]:
    """Return a client's resources on the node that its line names.

    Args:
        resources: of the client.
        address: of the line; `any`: any node.
        nodes: of the cluster.

    Raises:
        UsageError: no node has this address.
    """
    if address == ANY:
        return dict(resources)
    known = list(nodes)
    for node in known:
        if address in (node.address, node.name):
            return {**resources, f"node:{node.address}": NODE_SHARE}
    names = ", ".join(sorted({node.address for node in known})) or "none"
    raise UsageError(
        f"no node of the Ray cluster is {address}; its nodes are {names}; '{ANY}' takes any of them"
    )


def describe_lack(bundles: Sequence[Resources], nodes: Sequence[RayNode], free: Resources) -> str:
    """Return what a job needs of a cluster and what that has, for one that does not fit.

    Args:
        bundles: of the clients.
        nodes: of the cluster.
        free: what no one uses, of all nodes together.
    """
    wanted = " and ".join(
        f"{sum(other == bundle for other in bundles)} with {format_resources(bundle)}"
        for number, bundle in enumerate(bundles)
        if bundle not in bundles[:number]
    )
    need = (
        "1 client needs a node" if len(bundles) == 1 else f"{len(bundles)} clients need a node each"
    )
    have = "; ".join(
        f"{node.address} has {format_resources(_plain(node.resources))}" for node in nodes
    )
    return (
        f"{need}: {wanted}; the Ray cluster has {counted(len(nodes), 'node')} "
        f"({have}), and free of all that is {format_resources(_plain(free))}"
    )


def _plain(resources: Resources) -> dict[str, float]:
    """Return the resources that a user asks for: not memory, nor the marks of single nodes and
    of placement groups.
    """
    return {name: amount for name, amount in resources.items() if not _HIDDEN.match(name)}


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
