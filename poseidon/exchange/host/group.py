"""The workers of a host, as one of them sees them: their connections, their memory, and what passes
between them.

    "Parts", pieces             the next part of the sum of each can be read in the memory
    "Rows", piece, rows         factors: the payload is `rows` rows of u, then of v
    "Released", piece           the piece is not used any more in this iteration
    "Values", requests, pieces  the next value of each can be read; their owner has seen so many
                                requests of rank 0
    "Requests", count           its sender has seen so many requests of rank 0
    "Failed"                    the payload says why its sender cannot continue
    "Squares", number           a collection: squares of gradients, float64
    "Meet", number              a collection of the training loops: handles of memory, what was found
                                in it, that a worker takes messages, or has copied all values
    "Ask", number, what         asks for a part of the owner's state
    "Kept", number              the owner has begun to copy it
    "State", number, last       the payload is a part of it
                                Number -1: of what rank 0 begins with; its values can be read

Parts and values are in memory that they share (`memory.py`).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from poseidon.exchange.base import Trained
from poseidon.exchange.host.contributions import HostTree
from poseidon.exchange.host.unix_wire import UnixWire
from poseidon.exchange.peers import Gatherings, Peers
from poseidon.exchange.worker_links import FIRST
from ps_server import PeerLost, RemoteProtocolError, ServerError
from ps_server.errors import as_server_error
from ps_server.network import Network
from ps_server.transport.base import Buffer


class HostGroup:
    """The connections and the memory of one worker. All workers of the host make it together.

    Args:
        address: of the paths of their sockets, before the rank; see `UnixWire`.
        network: this worker's local rank, and the number of workers.
        tree: how their parts are added.
        tensors: the same on all workers.

    Raises:
        PeerLost: a worker has other tensors, or has gone.
        StalenessTimeout: one did not come in time.
        TransportError: sockets cannot be made.

    Attributes:
        file: the descriptor of a file that all workers have, empty and without a name. The
            connections close it.
        owners: the workers that own a piece; all of them, unless the tensors are small.
        meetings: collections of the training loops. Each makes one before it sends anything else.
    """

    def __init__(
        self, address: str, network: Network, tree: HostTree, tensors: Sequence[Trained]
    ) -> None:
        self.rank, self.size, self.tree = network.rank, network.size, tree
        self.network = network
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.owners: Collection[int] = range(self.size)

        wire = UnixWire(f"{address}-{self.rank}", None if self.rank else new_file())
        self.peers = Peers(replace(network, wire=wire), "host-links")
        self.links, self.monitor = self.peers.links, self.peers.monitor
        self._squares, self.meetings = (
            Gatherings(self.peers, kind, lambda missing: self.check_left(missing.__contains__))
            for kind in ("Squares", "Meet")
        )
        self.peers.on("Failed", 0, self._note_failure)
        own: dict[str, object] = {
            "a different number of workers on this machine": self.size,
            "different tensors": [[t.name, t.tensor.numel()] for t in tensors],
        }
        try:
            self.links.connect([f"{address}-{rank}" for rank in range(self.size)])
            for rank, hello in enumerate(self.meetings.gather(json.dumps(own).encode()).result()):
                for what in (key for key, its in json.loads(hello).items() if its != own[key]):
                    one, other = (network.name(each) for each in sorted((rank, self.rank)))
                    raise PeerLost(f"{other} has {what} than {one}; all must have the same")
        except Exception as error:
            self.links.fail(as_server_error(error, "the workers of this machine did not meet"))
            self.links.close()
            raise
        assert wire.file is not None
        self.file = wire.file

    def send(self, to: Sequence[int], kind: str, *numbers: int, payload: Buffer = b"") -> None:
        """Send a message to workers of this host."""
        with self.monitor:
            self.peers.send(to, kind, *numbers, payload=payload, priority=FIRST)

    def check_left(self, owing: Callable[[int], bool], *, answers: bool = False) -> None:
        """Let all fail if a worker has left that still owes something. Under the monitor.

        Args:
            answers: whether it is an answer, which workers give after they have left.

        Raises:
            PeerLost: names it.
        """
        for rank in sorted(self.links.left if answers else self.peers.finished):
            if owing(rank):
                how = "has gone" if answers else "has left before the end"
                error = PeerLost(f"{self.network.name(rank)}, on this machine, {how}")
                self.links.fail(error)
                raise error

    def leave(self) -> None:
        """Leave once all others have, or something has failed. It answers questions until then."""
        self.peers.finish(0)
        with suppress(ServerError):
            self.monitor.wait_for(
                lambda: self.links.left.union(self.peers.finished).issuperset(self.others) or None,
                "the other workers of this machine have not left",
                limited=False,
            )
        self.links.close()

    @staticmethod
    def _note_failure(_: int, __: Sequence[int], reason: Buffer) -> None:
        raise PeerLost(bytes(reason).decode(errors="replace"))

    def all_squares(self, own: Sequence[float]) -> float:
        """Return the exact sum of the squares of all workers of the host; 0 to those that own
        nothing, which do not wait: others may wait for them. All call it together.
        """
        payloads = self._squares.gather(np.asarray(own, "<f8").tobytes(), self.owners).result()
        for rank, payload in enumerate(payloads):
            if len(payload) % 8:
                raise RemoteProtocolError(f"{self.network.name(rank)} sends squares of odd bytes")
        return math.fsum(np.frombuffer(b"".join(payloads), "<f8"))


def new_file() -> int:
    """Make an empty file without a name; return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("poseidon", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
