"""The factors of one worker on their way to and from all others: `FactorSession` over `Peers`.

"Factors", table, clock, rows     the payload is `rows` rows of u, then of v, never copied here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from poseidon.exchange.factors.factor_rounds import Factors, FactorSession, Pair
from poseidon.exchange.peers import Peers
from ps_server import RemoteProtocolError
from ps_server.link import LinkPriority
from ps_server.network import Network
from ps_server.trace import NO_TRACE, Tracer, Track
from ps_server.transport.base import Buffer

T = TypeVar("T")


class FactorPeers:
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
        on_sent = self._note_sent if trace is not NO_TRACE else None
        self.peers = Peers.over_network(network, "factors", link=link, on_sent=on_sent)
        self.peers.on("Factors", 3, self._receive)
        self.links, self.monitor = self.peers.links, self.peers.monitor
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
            clock, others = self.session.send(table, pair).clock, self.peers.others
            payload = pair.flat.data.cast("B")
            self.peers.send(
                others, "Factors", table, clock, len(pair.u), payload=payload, priority=table
            )
            self.bytes_out[table] += pair.flat.nbytes * len(others)
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

    def _receive(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        began_ns = self._trace.now()
        table, clock, rows = fields
        if not 0 <= table < len(self.session.tables):
            raise RemoteProtocolError(f"worker {sender} sends factors of a table that is not there")
        spec = self.session.tables[table]
        pair = Pair.received(payload, rows, spec.outputs, spec.inputs)
        self.session.receive(sender, Factors(table, clock, pair))
        self.bytes_in[table] += pair.flat.nbytes
        self._trace.span(Track.FACTORS, "receive", spec.name, began_ns, worker=sender, clock=clock)

    def _note_sent(self, table: int, receiver: int, began_ns: int) -> None:
        name = self.session.tables[table].name
        self._trace.span(Track.FACTORS, "send", name, began_ns, worker=receiver)
