"""The connections of a worker that sums with all others, and its messages by their kind.

    [VERSION, kind, ...] payload

    "Part", bucket, round, number     the sum of a node of the tree: the receiver's slice of it
    "Values", bucket, round           rank 0's values of the receiver's slice
    "Mean", bucket, round             the sender's slice of the mean
    "Gather", number                  a contribution to a collection
    "Request", kind, clock            a request of rank 0
    "Finished", iterations            the sender's last message

`sums.py` takes the first three, `links_delivery.py` the next two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgpack

from poseidon.exchange.worker_links import FIRST, LAST, VERSION, WorkerLinks, read_header
from ps_server import PeerLeft, RemoteProtocolError, ServerError
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames

Receive = Callable[[int, Sequence[int], Buffer], None]
"""Takes a message: the sender's rank, the numbers of the header, and the payload. It is called
under the monitor, and raises `RemoteProtocolError` for a message that is not legal.
"""


class Peers:
    """The connections to all other workers.

    Attributes:
        monitor: guards what is to be sent and what receivers change; it fails with the connections.
        others: the ranks of the other workers, in the order in which messages for all are sent.
    """

    def __init__(self, network: Network) -> None:
        self.rank, self.size = network.rank, network.size
        self.timeout_s = network.timeout_s
        self.monitor = network.new_monitor(
            closed="the connections to the other workers are closed", hangs=""
        )
        self.links = WorkerLinks(
            network, f"sums-{network.rank}", monitor=self.monitor, receive=self._receive
        )
        self.others = self.links.others
        self._receivers: dict[str, tuple[int, Receive]] = {}
        self._finished: dict[int, int] = {}
        self.on("Finished", 1, self._note_finished)

    def on(self, kind: str, numbers: int, receive: Receive) -> None:
        """Pass messages of a kind to a receiver, before `links` are connected.

        Args:
            numbers: how many numbers follow it.
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
                if not len(fields) == len(numbers) == expected:
                    raise RemoteProtocolError(f"worker {sender} sends a {kind} with other fields")
                receive(sender, fields, frames[1])
            case _:
                raise RemoteProtocolError("a peer sent something that is not a message of a sum")

    def _note_finished(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        self._finished[sender] = fields[0]
