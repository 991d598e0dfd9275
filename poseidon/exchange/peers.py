"""The connections of a worker to others, and its messages by their kind.

    [VERSION, kind, ...] payload

    "Part", bucket, round, number     the sum of a node of the tree: the receiver's slice of it
    "Values", bucket, round           rank 0's values of the receiver's slice
    "Mean", bucket, round             the sender's slice of the mean
    "Gather", number                  a contribution to a collection
    "Request", kind, clock            a request of rank 0
    "Finished", iterations            the sender's last message

`sums.py` takes the first three, `links_delivery.py` the next two. The workers of a host have more
kinds (`host/group.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgpack

from poseidon.exchange.worker_links import FIRST, LAST, VERSION, WorkerLinks, read_header
from ps_server import PeerLeft, RemoteProtocolError, ServerError
from ps_server.monitor import Monitor
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames

Receive = Callable[[int, Sequence[int], Buffer], None]
"""Takes a message: the sender's rank, the numbers of the header, and the payload. It is called
under the monitor, and raises `RemoteProtocolError` for a message that is not legal.
"""


class Links(Protocol):
    """The contract of connections: `WorkerLinks` over a network, `HostLinks` within a host.

    Attributes:
        others: the ranks of the other workers, in the order in which messages for all are sent.
        left: those of them that have left.
    """

    others: list[int]
    left: set[int]

    def send(self, ranks: Sequence[int], priority: int, frames: list[Buffer]) -> None:
        """Send a message to some others; returns at once. Called under the monitor."""

    def wake(self) -> None:
        """Make the thread look at what is to be sent."""

    def fail(self, error: ServerError) -> None:
        """Make every waiting and later call raise `error`."""

    def close(self) -> None:
        """Send what is queued, and disconnect. Safe to call twice."""


L = TypeVar("L", bound=Links)


class Peers(Generic[L]):
    """The connections to all other workers, or to those of this host.

    Args:
        network: the place of this worker among those that are connected.
        connect: makes the connections, from the monitor and what receives messages.

    Attributes:
        monitor: guards what is to be sent and what receivers change; it fails with the connections.
        others: the ranks of the other workers, in the order in which messages for all are sent.
    """

    def __init__(
        self, network: Network, connect: Callable[[Monitor, Callable[[int, Frames], None]], L]
    ) -> None:
        self.rank, self.size = network.rank, network.size
        self.timeout_s = network.timeout_s
        self.monitor = network.new_monitor(
            closed="the connections to the other workers are closed", hangs=""
        )
        self.links = connect(self.monitor, self._receive)
        self.others = self.links.others
        self._receivers: dict[str, tuple[int | None, Receive]] = {}
        self._finished: dict[int, int] = {}
        self.on("Finished", 1, self._note_finished)

    @staticmethod
    def over_network(network: Network) -> Peers[WorkerLinks]:
        """Return the connections to all others of a network; `links.connect` follows."""

        def connect(monitor: Monitor, receive: Callable[[int, Frames], None]) -> WorkerLinks:
            name = f"sums-{network.rank}"
            return WorkerLinks(network, name, monitor=monitor, receive=receive)

        return Peers(network, connect)

    def on(self, kind: str, numbers: int | None, receive: Receive) -> None:
        """Pass messages of a kind to a receiver, before `links` are connected.

        Args:
            numbers: how many numbers follow it; None: any.
        """
        self._receivers[kind] = numbers, receive

    def send(
        self,
        receivers: Sequence[int],
        kind: str,
        *numbers: int,
        payload: Buffer,
        priority: int = FIRST,
    ) -> None:
        """Send a message; returns at once. Called under the monitor; `links.wake` follows.

        The payload must not be written to until it is certain that every receiver has it.

        Args:
            priority: messages of a lower number overtake others.
        """
        header = msgpack.packb([VERSION, kind, *numbers])
        self.links.send(receivers, priority, [header, payload])

    def check_left(self, iteration: int, of: Sequence[int] = ()) -> None:
        """Raise an error if a worker has left before it has contributed.

        Args:
            iteration: that is waited for.
            of: workers from whom something is still to come that belongs to no iteration.

        Raises:
            PeerLeft: names the first such worker.
        """
        for rank in sorted(self.links.left):
            finished = self._finished.get(rank, 0)
            if finished <= iteration or rank in of:
                raise PeerLeft(rank, finished, rank=self.rank)

    def close(self, iterations: int) -> None:
        """Leave after so many iterations. Safe to call twice."""
        with self.monitor, contextlib.suppress(ServerError):
            if self.others:
                self.send(self.others, "Finished", iterations, payload=b"", priority=LAST)
        self.links.close()

    def _receive(self, sender: int, frames: Frames) -> None:
        match read_header(frames[0]), len(frames):
            case [_, str(kind), *numbers], 2 if kind in self._receivers:
                expected, receive = self._receivers[kind]
                fields = [number for number in numbers if type(number) is int]
                if len(fields) != len(numbers) or expected not in (None, len(fields)):
                    raise RemoteProtocolError(f"worker {sender} sends a {kind} with other fields")
                receive(sender, fields, frames[1])
            case _:
                raise RemoteProtocolError("a peer sent something that is not a message of a sum")

    def _note_finished(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        self._finished[sender] = fields[0]


class Members:
    """Some of the workers that are connected, with ranks of their own: the workers of a plane.

    It has the contract of `Peers`, whose connections it uses and closes.

    Args:
        ranks: the members among the peers, in the order of their ranks here; this worker is one.
    """

    def __init__(self, peers: Peers[WorkerLinks], ranks: Sequence[int]) -> None:
        self._peers, self._ranks = peers, ranks
        self._of = {rank: place for place, rank in enumerate(ranks)}
        self.rank, self.size = self._of[peers.rank], len(ranks)
        self.timeout_s, self.monitor, self.links = peers.timeout_s, peers.monitor, peers.links
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]

    def on(self, kind: str, numbers: int, receive: Receive) -> None:
        """See `Peers.on`."""

        def take(sender: int, fields: Sequence[int], payload: Buffer) -> None:
            if sender not in self._of:
                raise RemoteProtocolError(f"worker {sender} has no part in these sums")
            receive(self._of[sender], fields, payload)

        self._peers.on(f"{kind} of a plane", numbers, take)

    def send(
        self,
        receivers: Sequence[int],
        kind: str,
        *numbers: int,
        payload: Buffer,
        priority: int = FIRST,
    ) -> None:
        """See `Peers.send`."""
        ranks = [self._ranks[receiver] for receiver in receivers]
        kind = f"{kind} of a plane"
        self._peers.send(ranks, kind, *numbers, payload=payload, priority=priority)

    def check_left(self, iteration: int, of: Sequence[int] = ()) -> None:
        """See `Peers.check_left`."""
        self._peers.check_left(iteration, [self._ranks[rank] for rank in of])

    def close(self, iterations: int) -> None:
        """See `Peers.close`."""
        self._peers.close(iterations)
