"""The workers of a host, as one of them sees them: their connections, their memory, and what passes
between them.

    "Parts", pieces             the next part of the sum of each can be read in the memory
    "Rows", piece, rows         factors: the payload is `rows` rows of u, then of v
    "Released", piece           the piece is not used any more in this iteration
    "Values", requests, pieces  the next value of each can be read; their owner has seen so many
                                requests of rank 0
    "Taken", number             all values before settlement `number` are copied
    "Requests", count           its sender has seen so many requests of rank 0
    "Squares", number           squares of gradients, float64
    "Ask", number, what         asks for a part of the owner's state
    "Kept", number              the owner has begun to copy it
    "State", number, last       the payload is a part of it
    "First", piece              rank 0's value can be read; the payload is its history
    "Given", 0                  the payload is what rank 0 was given of what codecs hold back

Parts and values are in memory that they share (`memory.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from poseidon.exchange.base import Trained
from poseidon.exchange.host.contributions import HostTree
from poseidon.exchange.host.links import HostLinks
from poseidon.exchange.host.memory import HostMemory, new_file
from poseidon.exchange.host.pieces import FlatPiece
from poseidon.exchange.peers import Peers
from poseidon.exchange.worker_links import FIRST
from ps_server import PeerLost, RemoteProtocolError, ServerError
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
        TransportError: memory or sockets cannot be made.
    """

    def __init__(
        self, address: str, network: Network, tree: HostTree, tensors: Sequence[Trained]
    ) -> None:
        self.rank, self.size, self.tree = network.rank, network.size, tree
        self.first = network.rank_of(0)
        self.others = [rank for rank in range(self.size) if rank != self.rank]

        def make(monitor: Monitor, receive: Callable[[int, Frames], None]) -> HostLinks:
            return HostLinks(address, network, monitor=monitor, receive=receive)

        self.peers: Peers[HostLinks] = Peers(network, make)
        self.links, self.monitor = self.peers.links, self.peers.monitor
        self._squares: dict[int, dict[int, list[float]]] = {}
        self._norms = 0
        self.peers.on("Squares", 1, self._take_squares)
        own = json.dumps({"tensors": [[t.name, t.tensor.numel()] for t in tensors]})
        try:
            hellos, self._file = self.links.meet(
                own.encode(), new_file() if not self.rank else None
            )
            for rank, hello in sorted(hellos.items()):
                if hello != own.encode():
                    one, other = sorted((rank, self.rank))
                    raise PeerLost(
                        f"{self.links.name(other)} has other tensors than {self.links.name(one)}; "
                        "all workers must have the same tensors"
                    )
        except Exception as error:
            self.links.refuse(as_server_error(error, "the workers of this machine did not meet"))
            network.interruption.check()
            raise

    def share(
        self, pieces: Sequence[FlatPiece], by_factors: frozenset[int], like: Tensor
    ) -> HostMemory:
        """Return the memory for these pieces, the same on all workers, which call it together.

        Args:
            by_factors: tensors that have no parts.
            like: a tensor of this worker's device.
        """
        counts = [len(self.tree.parts(worker)) for worker in range(self.size)]
        parts = [
            [
                0 if piece.index in by_factors or worker == piece.plane else count
                for worker, count in enumerate(counts)
            ]
            for piece in pieces
        ]
        return HostMemory(pieces, parts, self.rank, self.links, self._file, like)

    def send(self, to: Sequence[int], kind: str, *numbers: int, payload: Buffer = b"") -> None:
        """Send a message to workers of this host."""
        with self.monitor:
            self.peers.send(to, kind, *numbers, payload=payload, priority=FIRST)

    def check_left(self, owing: Callable[[int], bool], *, answers: bool = False) -> None:
        """Raise an error if a worker has left that still owes something. Under the monitor.

        Args:
            answers: whether it is an answer, which workers give after they have left.

        Raises:
            PeerLost: names it.
        """
        for rank in sorted(self.links.gone if answers else self.links.left):
            if owing(rank):
                how = "has gone" if answers else "has left before the end"
                raise PeerLost(f"{self.links.name(rank)}, on this machine, {how}")

    def all_squares(self, own: Sequence[float]) -> float:
        """Return the exact sum of the squares of all workers of the host. All call it together."""
        number, self._norms = self._norms, self._norms + 1
        self.send(self.others, "Squares", number, payload=np.asarray(own, "<f8").tobytes())

        def found() -> list[float] | None:
            came = self._squares.get(number, {})
            self.check_left(lambda rank: rank not in came)
            if len(came) < len(self.others):
                return None
            del self._squares[number]
            return [square for squares in came.values() for square in squares]

        others = self.monitor.wait_for(found, "the norm on this machine's workers did not come")
        return math.fsum([*own, *others])

    def _take_squares(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        if memoryview(payload).nbytes % 8:
            raise RemoteProtocolError(f"{self.links.name(sender)} sends squares of odd bytes")
        came = self._squares.setdefault(fields[0], {})
        came[sender] = np.frombuffer(payload, "<f8").tolist()

    def fail(self, error: ServerError) -> None:
        """End every wait here, and on the other workers of the host, with an error."""
        self.links.fail(error)

    def close(self) -> None:
        """Disconnect."""
        self.links.close()
