"""The connections of a worker to others, and its messages by their kind.

    [VERSION, kind, numbers...] payload ("")

    "Factors", table, clock, rows     the sender's factors of a tensor

    "Part", bucket, round, number     the sum of a node of the tree: the receiver's slice of it
    "Values", bucket, round           rank 0's values of the receiver's slice
    "Mean", bucket, round             the sender's slice of the mean
    "Memory", process, file           memory of the sender, with its nonce
    "Opened"                          the receiver's memory is open: payloads are read there
    "Gather", number                  a contribution to a collection
    "Request", kind, clock            a request of rank 0
    "Finished", iterations            the sender's last message

`factors/factor_rounds.py` takes the first, `allreduce/sums.py` the next five, `Gatherings` the next
one, `job_control.py` the one after. The workers of a host have more kinds (`host/group.py`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from poseidon.exchange.worker_links import FIRST, LAST, VERSION, WorkerLinks, read_header
from ps_server import Collection, PeerLeft, RemoteProtocolError, ServerError
from ps_server.errors import as_server_error
from ps_server.network import Network
from ps_server.protocol.schedule import LinkPriority
from ps_server.transport.base import Buffer, Frames

Receive = Callable[[int, Sequence[int], Buffer], None]
"""Takes a message: the sender's rank, the numbers of the header, and the payload. It is called
under the monitor, and raises `RemoteProtocolError` for a message that is not legal; the name of
the sender is put before its text.
"""


class Peers:
    """The other workers of a network, of a host, or of a plane.

    Args:
        network: who the workers are; `links.connect` follows.
        name: of the thread of their connections.
        link, on_sent: see `WorkerLinks`.

    Attributes:
        rank: of this worker among them.
        size: how many they are, with this worker.
        others: the ranks of the others, in the order in which messages for all are sent.
        monitor: guards what is to be sent and what receivers change; it fails with the connections.
        finished: the iterations of those that have sent their last message, by rank of the network.
    """

    def __init__(
        self,
        network: Network,
        name: str = "sums",
        *,
        link: LinkPriority | None = None,
        on_sent: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.timeout_s = network.timeout_s
        self._network = network
        self.monitor = network.new_monitor(
            closed="the connections to the other workers are closed", hangs=""
        )
        self.links = WorkerLinks(
            network,
            f"{name}-{network.rank}",
            monitor=self.monitor,
            receive=self._receive,
            link=link,
            on_sent=on_sent,
        )
        self._receivers: dict[str, tuple[int | None, Receive]] = {}
        self.finished: dict[int, int] = {}
        self._suffix = ""
        self._take_ranks(range(network.size), network.rank)
        self.on("Finished", 1, self._note_finished)

    def among(self, ranks: Sequence[int]) -> Peers:
        """Return some of these workers, over the same connections, with ranks of their own and
        kinds of messages of their own.

        Args:
            ranks: of the members here, this worker's too, in the order of their new ranks.
        """
        members = copy.copy(self)
        members._suffix = " of a plane"
        members._take_ranks(ranks, ranks.index(self.rank))
        return members

    def _take_ranks(self, ranks: Sequence[int], rank: int) -> None:
        self.rank, self.size = rank, len(ranks)
        self.others = [(rank + i) % len(ranks) for i in range(1, len(ranks))]
        self._ranks = ranks
        self._places = {linked: place for place, linked in enumerate(ranks)}

    def neighbours(self) -> list[int]:
        """Return the ranks of the others on this machine, once connected."""
        return [self._places[n] for n in self.links.neighbours() if n in self._places]

    def names(self, ranks: Iterable[int]) -> str:
        """Return the names of some of these workers in messages; empty: none."""
        return ", ".join(self._network.name(self._ranks[rank]) for rank in ranks)

    def addresses(self, offers: Sequence[Mapping[str, Any]], name: str) -> list[str]:
        """Return the addresses that all workers have offered under a name, by rank.

        Raises:
            RemoteProtocolError: one has not.
        """
        found: list[Any] = [offer.get(name) for offer in offers]
        for rank, address in enumerate(found):
            if not isinstance(address, str) or not address.startswith("tcp://"):
                raise RemoteProtocolError(f"{self.names([rank])} sent no address at the rendezvous")
        return found

    def on(self, kind: str, numbers: int | None, receive: Receive) -> None:
        """Pass messages of a kind to a receiver, before `links` are connected.

        Args:
            numbers: how many numbers follow it; None: any.
        """

        def take(sender: int, fields: Sequence[int], payload: Buffer) -> None:
            if sender not in self._places:
                raise RemoteProtocolError(f"{self._network.name(sender)} has no part in these sums")
            try:
                receive(self._places[sender], fields, payload)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"{self._network.name(sender)}: {error}") from error

        self._receivers[kind + self._suffix] = numbers, take

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
        header = msgpack.packb([VERSION, kind + self._suffix, *numbers])
        linked = [self._ranks[receiver] for receiver in receivers]
        self.links.send(linked, priority, [header, payload])

    def check_left(self, iteration: int, of: Sequence[int] = ()) -> None:
        """Raise an error if a worker has left before it has contributed.

        Args:
            iteration: that is waited for.
            of: workers from whom something is still to come that belongs to no iteration.

        Raises:
            PeerLeft: names the first such worker.
        """
        for linked in sorted(self.links.left):
            finished = self.finished.get(linked, 0)
            if finished <= iteration or self._places.get(linked) in of:
                own = self._network.rank_of(self._ranks[self.rank])
                raise PeerLeft(self._network.rank_of(linked), finished, rank=own)

    def failing(self, what: str) -> Callable[[Exception], None]:
        """Return what ends every wait of these with an error, as long as they are connected."""

        def fail(error: Exception) -> None:
            if not self.monitor.closed:
                self.links.fail(as_server_error(error, what))

        return fail

    def finish(self, iterations: int) -> None:
        """Send the last message, after so many iterations."""
        with self.monitor, contextlib.suppress(ServerError):
            if self.links.others:
                header = msgpack.packb([VERSION, "Finished", iterations])
                self.links.send(self.links.others, LAST, [header, b""])

    def close(self, iterations: int) -> None:
        """Leave after so many iterations. Safe to call twice."""
        self.finish(iterations)
        self.links.close()

    def _receive(self, sender: int, frames: Frames) -> None:
        header, *payloads = frames
        match read_header(header), payloads:
            case [_, str(kind), *numbers], [payload, *end] if kind in self._receivers:
                expected, receive = self._receivers[kind]
                fields = [number for number in numbers if type(number) is int]
                sends = f"{self._network.name(sender)} sends a {kind}"
                if len(fields) != len(numbers) or expected not in (None, len(fields)):
                    raise RemoteProtocolError(f"{sends} with wrong fields")
                if len(end) > 1 or any(map(len, end)):
                    raise RemoteProtocolError(f"{sends} with too many frames")
                receive(sender, fields, payload)
            case _:
                raise RemoteProtocolError("a peer sent something that is not a message of a worker")

    def _note_finished(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        self.finished[sender] = fields[0]


class Gatherings:
    """Collections among all peers: each sends its payload to all that need it.

    Args:
        kind: of their messages.
        check_left: raises an error if one of these has left, whose payload is missing. Called under
            the monitor.
    """

    def __init__(
        self, peers: Peers, kind: str, check_left: Callable[[Sequence[int]], None]
    ) -> None:
        self._peers = peers
        self._kind = kind
        self._check_left = check_left
        self._next = 0
        self._came = [0] * peers.size
        self.payloads: dict[int, dict[int, bytes]] = {}
        """Those that have come, by the number of their collection, and by rank."""
        peers.on(kind, 1, self._take)

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        """Contribute to the next collection; return at once. All peers do so in the same order.

        Args:
            to: the ranks that need the payloads, the same for all: others get none. None: all.
        """
        peers = self._peers
        targets = peers.others if to is None else [rank for rank in peers.others if rank in to]
        with peers.monitor:
            number, self._next = self._next, self._next + 1
            if targets:
                peers.send(targets, self._kind, number, payload=payload)
            self.payloads.setdefault(number, {})[peers.rank] = payload
        peers.links.wake()

        if to is not None and peers.rank not in to:
            del self.payloads[number]
            return Collection.here(())

        found = self.payloads[number]

        def missing() -> list[int]:
            return [rank for rank in range(peers.size) if rank not in found]

        def take() -> tuple[bytes, ...] | None:
            if ranks := missing():
                self._check_left(ranks)
                return None
            del self.payloads[number]
            return tuple(found[rank] for rank in range(peers.size))

        return Collection.guarded(
            peers.monitor, take, hangs=lambda: f"; missing: {peers.names(missing())}"
        )

    def _take(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        (number,) = fields
        if number < self._came[sender]:
            raise RemoteProtocolError("a contribution to a collection came out of turn")
        self._came[sender] = number + 1  # in between are those for others
        self.payloads.setdefault(number, {})[sender] = bytes(payload)
