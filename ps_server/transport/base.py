"""The contract of a transport: frames in, frames out, between one server and its clients.

Laws: frames from one peer to another arrive in the order they were sent, or not at all. `send` never blocks: where a
few messages wait for the peer already it takes nothing and says so, and the next `receive` returns, with nothing if
need be, about as soon as it is worth trying again. So what waits longer waits with the sender, who may reorder it.
Only one thread uses a transport, save `wake`, which any thread may call. A sent buffer must not be written
to until the protocol above knows that it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]

MAX_BATCH = 256
"""Messages that one `receive` hands over at most, so that no peer can starve the others."""


class ServerTransport(Protocol):
    """The end that is bound to an address and answers peers by their name."""

    @property
    def address(self) -> str:
        """Where clients reach this end."""

    @property
    def refused(self) -> int:
        """How many have tried to connect and were not admitted. Any thread may ask."""

    @property
    def connections(self) -> int:
        """How many peers are connected at this moment."""

    def admit_no_more(self) -> None:
        """Everybody has come: ignore whoever tries to connect from now on. Safe to call twice."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """What has come, as (peer, frames); waits up to `timeout_s` seconds for the first."""

    def blocks(self, peer: bytes) -> bool:
        """Whether it is too early to try again to send to a peer that took nothing."""

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Send to a peer; to one that has gone, drop. Returns whether the frames were taken."""

    def wake(self) -> None:
        """Make a waiting `receive` return. Any thread may call it."""

    def close(self) -> None:
        """Send what is still queued, for a moment, and let go of the address."""


class ClientTransport(Protocol):
    """The end that is connected to every shard, by index."""

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """What has come, as (shard, frames); waits up to `timeout_s` seconds for the first.

        Raises:
            PeerLost: a shard that was connected has gone, or cannot be reached any more.
        """

    def blocks(self, shard: int) -> bool:
        """Whether it is too early to try again to send to a shard that took nothing."""

    def send(self, shard: int, frames: Frames) -> bool:
        """Send to a shard. Returns whether the frames were taken."""

    def wake(self) -> None:
        """Make a waiting `receive` return. Any thread may call it."""

    def close(self) -> None:
        """Send what is still queued, for a moment, and disconnect."""
