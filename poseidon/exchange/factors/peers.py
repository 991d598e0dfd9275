"""The factors of one worker on their way to and from all others: `FactorSession` over
`WorkerLinks`. A pair is a msgpack header, then u and v as raw float32, never copied here, and an
end:

    [VERSION, "Factors", table, clock, rows] u v ""

The last frame is empty: the sender's transport begins it only when the kernel has all of v, whereas
an encrypted frame counts as sent from its beginning.

Law: `decode` accepts exactly what `encode` makes; everything else is a RemoteProtocolError. Sizes
are checked against the tables here, legality at this moment by `FactorSession`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgpack
import numpy as np

from poseidon.exchange.base import Array
from poseidon.exchange.factors.factor_rounds import Factors, FactorSession, FactorTable, Pair
from poseidon.exchange.worker_links import VERSION, WorkerLinks, read_header
from ps_server import RemoteProtocolError
from ps_server.link import LinkPriority
from ps_server.network import Network
from ps_server.trace import NO_TRACE, Tracer, Track
from ps_server.transport.base import Buffer, Frames

T = TypeVar("T")
MAX_ROWS = 2**24


class Peers:
    """The factors of one worker.

    Args:
        trace: where spans of factors that are sent, received and applied go.
        link: taken as long as factors have to leave this host; None: no other sender waits for it.

    Attributes:
        monitor: guards the session and what is to be sent.
    """

    def __init__(
        self,
        session: FactorSession,
        network: Network,
        *,
        trace: Tracer = NO_TRACE,
        link: LinkPriority | None = None,
    ) -> None:
        self.session = session
        self.monitor = network.new_monitor(
            closed="the connections to the other workers are closed", hangs=""
        )
        self.links = WorkerLinks(
            network,
            f"factors-{session.rank}",
            monitor=self.monitor,
            receive=self._receive,
            link=link,
            on_sent=self._note_sent if trace is not NO_TRACE else None,
        )
        self.bytes_out = [0] * len(session.tables)
        self.bytes_in = [0] * len(session.tables)
        self._trace = trace

    def broadcast(self, table: int, pair: Pair) -> None:
        """Send this worker's next pair of a table to every other; returns at once.

        Factors that the next forward pass needs first overtake others: a table's id is its place in
        the forward order. The pair must not be written to until it is certain that every other
        worker has it: see `FactorSession`.
        """
        with self.monitor:
            self.monitor.check()
            frames = encode(self.session.send(table, pair))
            self.links.send(self.links.others, table, frames)
            self.bytes_out[table] += (pair.u.nbytes + pair.v.nbytes) * len(self.links.others)
            self.monitor.notify()
        self.links.wake()

    def wait_for(self, question: Callable[[], T | None], otherwise: str, *, table: int) -> T:
        """Wait until `question` has an answer, and return it (`Monitor.wait_for`).

        Args:
            question: called under the lock whenever something has changed.
            otherwise: the beginning of the sentence that is raised when there is none in time.
            table: whose factors are waited for.

        Raises:
            StalenessTimeout: it did not in time; the text names the workers whose factors are
                missing.
            PeerLost: the connection failed.
        """

        def hangs() -> str:
            lagging = ", ".join(f"worker {rank}" for rank in self.session.lagging(table))
            return f"; missing: {lagging or 'none, they are not applied'}"

        return self.monitor.wait_for(question, otherwise, hangs=hangs)

    def _receive(self, sender: int, frames: Frames) -> None:
        began_ns = self._trace.now()
        factors = decode(frames, self.session.tables)
        self.session.receive(sender, factors)
        self.bytes_in[factors.table] += factors.pair.u.nbytes + factors.pair.v.nbytes
        name = self.session.tables[factors.table].name
        self._trace.span(
            Track.FACTORS, "receive", name, began_ns, worker=sender, clock=factors.clock
        )

    def _note_sent(self, table: int, receiver: int, began_ns: int) -> None:
        name = self.session.tables[table].name
        self._trace.span(Track.FACTORS, "send", name, began_ns, worker=receiver)


def encode(message: Factors) -> list[Buffer]:
    """Turn a message into frames; arrays are passed on as views of their own memory."""
    u, v = message.pair
    header = [VERSION, "Factors", message.table, message.clock, len(u)]
    return [msgpack.packb(header), _raw(u), _raw(v), b""]


def decode(frames: Sequence[Buffer], tables: Sequence[FactorTable]) -> Factors:
    """Turn frames into a message; arrays are views of the frames.

    Raises:
        RemoteProtocolError: the frames are not a message that `encode` could have made for these
            tables.
    """
    match read_header(frames[0]), len(frames):
        case [int(), "Factors", int(table), int(clock), int(rows)], 4 if not len(frames[3]):
            if not (0 <= table < len(tables) and clock >= 0 and 0 <= rows <= MAX_ROWS):
                raise RemoteProtocolError(
                    "factors name a table, clock or number of rows that cannot be"
                )
            spec = tables[table]
            u, v = _matrix(frames[1], rows, spec.outputs), _matrix(frames[2], rows, spec.inputs)
            return Factors(table, clock, Pair(u, v))
        case _:
            raise RemoteProtocolError("a peer sent something that is not factors")


def _matrix(frame: Buffer, rows: int, columns: int) -> Array:
    if memoryview(frame).nbytes != 4 * rows * columns:
        raise RemoteProtocolError(
            f"a factor of {rows} x {columns} has {memoryview(frame).nbytes} bytes"
        )
    return np.frombuffer(frame, dtype="<f4").reshape(rows, columns)


def _raw(array: Array) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").reshape(-1).data.cast("B")
