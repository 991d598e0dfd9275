"""The workers of a host, as one of them sees them: their connections, their memory, and what passes
between them.

    "Parts", pieces             the next part of the sum of each can be read in the memory
    "Rows", piece, rows         factors: the payload is `rows` rows of u, then of v
    "Released", piece           the piece is not used any more in this iteration
    "Values", requests, pieces  the next value of each can be read; their owner has seen so many
                                requests of rank 0
    "Requests", count           its sender has seen so many requests of rank 0
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
from collections.abc import Callable, Sequence

import numpy as np

from poseidon.exchange.base import Trained
from poseidon.exchange.host.contributions import HostTree
from poseidon.exchange.host.links import HostLinks
from poseidon.exchange.peers import Gatherings, Peers
from poseidon.exchange.worker_links import FIRST
from ps_server import PeerLost, RemoteProtocolError
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames


class HostGroup:
    """The connections and the memory of one worker. All workers of the host make it together.

    Args:
        address: path of their sockets; see `HostLinks`.
        network: this worker's local rank, and the number of workers.
        tree: how their parts are added.
        tensors: the same on all workers.

    Raises:
        PeerLost: a worker has other tensors, or has gone.
        StalenessTimeout: one did not come in time.
        TransportError: sockets cannot be made.

    Attributes:
        file: the descriptor of a file that all workers have, empty and without a name.
        meetings: collections of the training loops. Each makes one before it sends anything else.
    """

    def __init__(
        self, address: str, network: Network, tree: HostTree, tensors: Sequence[Trained]
    ) -> None:
        self.rank, self.size, self.tree = network.rank, network.size, tree
        self.network = network
        self.others = [rank for rank in range(self.size) if rank != self.rank]

        def make(monitor: Monitor, receive: Callable[[int, Frames], None]) -> HostLinks:
            return HostLinks(address, network, monitor=monitor, receive=receive)

        self.peers: Peers[HostLinks] = Peers(network, make)
        self.links, self.monitor = self.peers.links, self.peers.monitor
        self._squares, self.meetings = (
            Gatherings(self.peers, kind, lambda missing: self.check_left(missing.__contains__))
            for kind in ("Squares", "Meet")
        )
        own = json.dumps({"tensors": [[t.name, t.tensor.numel()] for t in tensors]})
        try:
            hellos, self.file = self.links.meet(own.encode(), new_file() if not self.rank else None)
            for rank, hello in sorted(hellos.items()):
                if hello != own.encode():
                    one, other = sorted((rank, self.rank))
                    raise PeerLost(
                        f"{self.network.name(other)} has different tensors than "
                        f"{self.network.name(one)}; all workers must have the same tensors"
                    )
        except Exception as error:
            self.links.refuse(as_server_error(error, "the workers of this machine did not meet"))
            network.interruption.check()
            raise
        self.links.start()

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
        for rank in sorted(self.links.gone if answers else self.links.left):
            if owing(rank):
                how = "has gone" if answers else "has left before the end"
                error = PeerLost(f"{self.network.name(rank)}, on this machine, {how}")
                self.links.fail(error)
                raise error

    def all_squares(self, own: Sequence[float]) -> float:
        """Return the exact sum of the squares of all workers of the host. All call it together."""
        payloads = self._squares.gather(np.asarray(own, "<f8").tobytes()).result()
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
