"""The contract of a transport: frames in, frames out, between one server and its clients.

Laws: frames from one peer to another arrive in the order they were sent, or not at all. `send`
never blocks: where a few messages wait for the peer already, or a client has not agreed on keys
with the shard yet, it takes nothing and returns False, and the next `receive` returns, empty if
need be, about as soon as it is worth trying again. So messages
that wait longer wait with the sender, which may reorder them. Only one thread uses a transport,
save `wake`, which any thread may call. A sent buffer must not be written to until the protocol
above knows that it has arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from ps_server.keys import Keyring

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]
Peer = TypeVar("Peer")

MAX_BATCH = 256
"""Most messages that one `receive` returns, so that no peer can starve the others."""


class Transport(Protocol[Peer]):
    """An end of connections with several peers."""

    def receive(self, timeout_s: float) -> list[tuple[Peer, Frames]]:
        """Return what has come, as (peer, frames); waits up to `timeout_s` seconds for the first.

        Raises:
            PeerLost: a shard that was connected has ended, or cannot be reached any more.
            PeerUnreachable: a shard could not be connected to within the transport's limit.
        """

    def blocks(self, peer: Peer, /) -> bool:
        """Return whether it is too early to try again to send to a peer that took nothing."""

    def send(self, peer: Peer, frames: Frames, /) -> bool:
        """Send to a peer; returns whether the frames were taken. A server drops them if the peer
        has gone.
        """

    def wake(self) -> None:
        """Make a waiting `receive` return. Any thread may call it."""

    def close(self, *, drops: bool = False) -> None:
        """Send what is still queued, for a moment, and let go of the address and the connections.

        Args:
            drops: drop it instead.
        """


class ServerTransport(Transport[bytes], Protocol):
    """The end that is bound to an address and answers peers by their name."""

    @property
    def address(self) -> str:
        """Where clients reach this end."""

    @property
    def refused(self) -> int:
        """The number of peers that have tried to connect and were not admitted.

        Any thread may read it.
        """

    @property
    def connections(self) -> int:
        """The number of peers that are connected now."""

    def admit_no_more(self) -> None:
        """Ignore every further attempt to connect: all peers are connected. Safe to call twice."""

    def known(self, peer: bytes) -> None:
        """Note that a peer is the job's. Connections of others end when they become too many."""


class ClientTransport(Transport[int], Protocol):
    """The end that is connected to every shard, by index."""

    def done_with(self, shard: int) -> None:
        """Note that a shard has all that was sent: its end is not a loss."""


class TrackedTransport(ClientTransport, Protocol):
    """A client's end that says what has left this host, and which connections are lost."""

    @property
    def lost(self) -> Collection[int]:
        """The peers whose connections stood and are lost.

        Raises:
            PeerUnreachable: as `receive`.
        """

    def describe_loss(self, shard: int) -> str:
        """Return a loss as a part of a sentence."""

    def unsent(self, shard: int) -> int:
        """Return how many messages were taken that have not all left this host."""


class Wire(Protocol):
    """Makes the ends of connections of a worker, and tells the time by which they wait."""

    @property
    def near(self) -> bool:
        """Whether its peers are processes of this user on this machine. `send` then takes every
        message, on any thread, and the end of a connection is the end of a process.
        """

    def listen(self, host: str, keys: Keyring | None) -> ServerTransport:
        """Return an end that listens on a free port of an address."""

    def connect(self, addresses: Sequence[str], keys: Keyring | None) -> TrackedTransport:
        """Return an end that is connected to these addresses."""

    def now(self) -> float:
        """Return the seconds of a clock that is never set."""
