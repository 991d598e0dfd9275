"""Both ends of encrypted connections: the handshake, then sealed packets. Parts in, frames out;
knows no socket.

Law: the first message of the handshake is what ZeroMQ's authentication asks about, so a peer
without a key of the job is refused before anything else of it is read. A first message that has led
to a connection is never admitted again. Nothing is delivered before the peer has sealed a packet
with the agreed key, which proves that the handshake was not a repeated one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps_server.errors import PacketsMissing, RemoteProtocolError
from ps_server.keys import KeyPair, Keyring, key_bytes
from ps_server.transport.base import Buffer
from ps_server.transport.handshake import KEY_BYTES, Initiator, respond
from ps_server.transport.sealing import Opener, Sealer, Suite, choose, offer

_CPU_INFO = Path("/proc/cpuinfo")


@functools.cache
def has_aes() -> bool:
    """Return whether this processor has instructions for AES."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = (line.split() for line in lines if line.lower().startswith(("flags", "features")))
    return "aes" in next(flags, [])


class ConnectingEnd:
    """One connection of a client.

    Args:
        keys: own pair, and the public keys to expect.
        shard: which of those.
    """

    def __init__(self, keys: Keyring, shard: int) -> None:
        self._initiator = Initiator(
            key_bytes(keys.own.secret),
            key_bytes(keys.expect[shard]),
            offer(has_aes=has_aes()),
        )
        self.sealer: Sealer | None = None
        """Seals packets, once the keys are agreed."""
        self._opener: Opener | None = None

    @property
    def first(self) -> bytes:
        """The first message of the handshake."""
        return self._initiator.first

    def receive(self, parts: Sequence[memoryview]) -> Sequence[Buffer]:
        """Act upon what has come; returns the frames of a packet.

        Raises:
            PacketsMissing: packets were taken out, here or on the way to the shard.
            RemoteProtocolError: it is not from the shard, or came before.
        """
        if self._opener is None:
            if len(parts) != 1:
                raise RemoteProtocolError("a packet came before the handshake")
            agreed = self._initiator.finish(bytes(parts[0]))
            suite = Suite(agreed.payload[0])
            self.sealer, self._opener = Sealer(suite, agreed.send), Opener(suite, agreed.receive)
            return ()
        frames = self._opener.open(parts)
        if not frames:
            raise PacketsMissing("the other end misses packets")
        return frames

    def is_overdue(self) -> bool:
        """See `Opener.is_overdue`."""
        return self._opener is not None and self._opener.is_overdue()


@dataclass(slots=True, kw_only=True)
class ServerConnection:
    """One connection of a server.

    Args:
        second: the second message of the handshake, which answers the first.
        sealer: of what is sent.
        opener: of what is received.
    """

    second: bytes = field(repr=False)
    sealer: Sealer
    opener: Opener
    peer: bytes = b""
    """The name of the peer, once it has proved that it has the keys."""
    broken: bool = False
    """Whether packets are missing: nothing more is delivered."""

    @classmethod
    def answering(cls, secret: bytes, first: bytes, admit: Collection[bytes]) -> ServerConnection:
        """Return the connection that a first message opens; arguments as for `respond`.

        Raises:
            RemoteProtocolError: it is not from a key to admit, or for another server.
        """
        second, agreed = respond(
            secret, first, admit, lambda offered: bytes([choose(offered, has_aes=has_aes()).value])
        )
        suite = choose(agreed.payload, has_aes=has_aes())
        sealer, opener = Sealer(suite, agreed.send), Opener(suite, agreed.receive)
        return cls(second=second, sealer=sealer, opener=opener)


class ListeningEnd:
    """All connections of a server.

    Args:
        keys: own pair, and the public keys to admit.
    """

    def __init__(self, keys: Keyring) -> None:
        _rehearse()
        self._secret = key_bytes(keys.own.secret)
        self._admit = frozenset(key_bytes(key) for key in keys.admit)
        self._sessions: dict[bytes, ServerConnection] = {}
        self._numbers: dict[bytes, bytes] = {}
        self._of_peer: dict[bytes, ServerConnection] = {}

    @property
    def unproved(self) -> int:
        """The number of sessions whose peers have not proved that they have the keys."""
        return len(self._sessions) - len(self._of_peer)

    def admit(self, first: bytes) -> bytes | None:
        """Return the number of the session that a first message opens; None: refuse it."""
        ephemeral = first[:KEY_BYTES]
        number = self._numbers.get(ephemeral)
        if number is not None:  # it connects again, or somebody repeats what it has said
            return None if self._sessions[number].peer else number
        try:
            session = ServerConnection.answering(self._secret, first, self._admit)
        except RemoteProtocolError:
            return None
        number = self._numbers[ephemeral] = b"%d" % len(self._numbers)
        self._sessions[number] = session
        return number

    def receive(self, number: bytes, peer: bytes, parts: Sequence[memoryview]) -> Sequence[Buffer]:
        """Open what has come from a peer; returns the frames, none of its first packet.

        Raises:
            PacketsMissing: packets were taken out; nothing more is delivered.
            RemoteProtocolError: it was not sealed by the peer, or came before.
        """
        session = self._sessions[number]
        if session.broken or session.peer not in (b"", peer):
            raise RemoteProtocolError("a packet came on a connection that has ended")
        try:
            frames = session.opener.open(parts)
        except PacketsMissing:
            session.broken = True
            self._prove(session, peer)
            raise
        self._prove(session, peer)
        return frames

    def _prove(self, session: ServerConnection, peer: bytes) -> None:
        session.peer = peer
        self._of_peer[peer] = session

    def knock(self, number: bytes, parts: Sequence[memoryview]) -> bytes | None:
        """Return the second message where a peer has just connected and asks for it, else None."""
        session = self._sessions[number]
        asks = not session.peer and len(parts) == 1 and not parts[0].nbytes
        return session.second if asks else None

    def overdue(self) -> list[bytes]:
        """Return the peers whose packets are overdue; see `Opener.is_overdue`."""
        return [peer for peer, each in self._of_peer.items() if each.opener.is_overdue()]

    def sealer(self, peer: bytes) -> Sealer | None:
        """Return what seals packets to a peer; None: there is no such peer."""
        session = self._of_peer.get(peer)
        return session.sealer if session else None


@functools.cache
def _rehearse() -> None:
    """Make one handshake within this process. The cryptographic library loads parts of itself at
    their first use; later strangers may hold all files that the process can open.
    """
    own = KeyPair.new()
    near = ConnectingEnd(Keyring(own=own, expect=(own.public,)), 0)
    far = ServerConnection.answering(key_bytes(own.secret), near.first, {key_bytes(own.public)})
    near.receive([memoryview(far.second)])
    assert near.sealer is not None
    far.opener.open(near.sealer.packet(()))
