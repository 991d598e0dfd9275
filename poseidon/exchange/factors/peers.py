"""The factors of one worker on their way to and from all others: `FactorSession` over
`WorkerLinks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from poseidon.exchange.factors.factor_frames import decode, encode
from poseidon.exchange.factors.factor_rounds import FactorSession, Pair
from poseidon.exchange.worker_links import WorkerLinks
from ps_server.link import LinkPriority
from ps_server.network import Network
from ps_server.trace import NO_TRACE, Tracer, Track
from ps_server.transport.base import Frames

T = TypeVar("T")


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
