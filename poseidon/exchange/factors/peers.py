"""The connections of a worker to all others: one thread that moves factors between sockets and
`FactorSession`.

Each worker listens on an address of its own and is connected to every other's; pairs are sent to
the others in the order rank + 1, rank + 2, ..., so that no worker is the first for all others. Law:
a `Join` with the job's secret is the first message of a peer; a message that is not valid is
dropped and counted, and changes nothing.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from poseidon.exchange.factors.factor_frames import Buffer, Join, Leave, decode, encode
from poseidon.exchange.factors.factor_rounds import Factors, FactorSession, Pair
from poseidon.exchange.factors.outbox import FIRST, LAST, Outbox
from ps_server import PeerLost, RemoteProtocolError, ServerError
from ps_server.errors import as_server_error
from ps_server.link import LinkPriority
from ps_server.monitor import Monitor
from ps_server.network import Network
from ps_server.trace import NO_TRACE, Tracer, Track
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport

POLL_S = 0.5
RETRY_S = 0.002
"""Between two attempts to send to a peer whose queue was full, and between two looks whether all
messages have left.
"""
LEAVE_S = 1.0
"""How long after the end of a connection its `Leave` may be handled."""
LINGER_S = 2.0
"""How long `close` tries to send what is queued; a peer that has gone takes nothing more."""
SEND_BUFFER_BYTES = 512 * 1024
"""What the kernel holds for each other worker, four times what it holds for a shard, so that
factors get most of a link which the shards' values need as well; pushes wait until they have
left (`LinkPriority`).
"""

T = TypeVar("T")


class Peers:
    """The connection of one worker to all others.

    Args:
        session: what has come and gone.
        network: how they reach each other; this worker listens on a free port of its host.
        trace: where spans of factors that are sent, received and applied go.
        link: taken as long as anything has to leave this host: is not all with its kernel. None: no
            other sender waits for it.
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
        self.monitor = Monitor(
            network.timeout_s, closed="the connections to the other workers are closed", hangs=""
        )
        """Guards the session and what is to be sent."""
        self.dropped = 0
        self.bytes_out = [0] * len(session.tables)
        self.bytes_in = [0] * len(session.tables)
        self._link = link or LinkPriority()
        self._trace = trace
        self._network = network
        self._listening = ZmqServerTransport(f"tcp://{network.host}:0", network.keys)
        self._others = [(session.rank + i) % session.workers for i in range(1, session.workers)]
        self._sending: ZmqClientTransport | None = None
        self._outboxes = [Outbox() for _ in self._others]
        self._ranks: dict[bytes, int] = {}
        self._left: set[int] = set()
        self._lost_s: dict[int, float] = {}
        self._thread = threading.Thread(
            target=self._pump, name=f"factors-{session.rank}", daemon=True
        )

    @property
    def address(self) -> str:
        """Where the others reach this worker."""
        return self._listening.address

    @property
    def refused(self) -> int:
        """The number of peers that have tried to connect and were not admitted."""
        return self._listening.refused

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to every other worker; from now on factors move.

        Args:
            addresses: of all workers, by rank.
        """
        keys = self._network.keys
        if keys is not None:
            keys = replace(keys, expect=tuple(keys.admit[rank] for rank in self._others))
        self._sending = ZmqClientTransport(
            [addresses[rank] for rank in self._others],
            keys,
            send_buffer_bytes=SEND_BUFFER_BYTES,
            tracked=True,
        )
        join = encode(Join(self.session.rank, self._network.token))
        for outbox in self._outboxes:
            outbox.add(FIRST, join)
        self._thread.start()

    def broadcast(self, table: int, pair: Pair) -> None:
        """Send this worker's next pair of a table to every other; returns at once.

        The pair must not be written to until it is certain that every other worker has it: see
        `FactorSession`.
        """
        with self.monitor:
            self.monitor.check()
            frames = encode(self.session.send(table, pair))
            for outbox in self._outboxes:
                outbox.add(table, frames)
                self._link.take()
                self.bytes_out[table] += pair.u.nbytes + pair.v.nbytes
            self.monitor.notify()
        self._listening.wake()

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

    def fail(self, error: ServerError) -> None:
        """Make every waiting and later call raise `error`."""
        with self.monitor:
            self.monitor.fail(error)
            self._link.free()

    def close(self) -> None:
        """Send what is queued, and disconnect. Safe to call twice."""
        with self.monitor:
            if self.monitor.closed:
                return
            for outbox in self._outboxes:
                outbox.add(LAST, encode(Leave()))
            self.monitor.close()
        self._listening.wake()
        if self._thread.ident is not None:
            self._thread.join()
        if self._sending is not None:
            self._sending.close()
        self._listening.close()
        with self.monitor:
            self._link.free()

    def _pump(self) -> None:
        assert self._sending is not None
        try:
            give_up_s = float("inf")
            while True:
                closing = self.monitor.closed
                if closing:
                    give_up_s = min(give_up_s, time.monotonic() + LINGER_S)
                gone = self._sending.lost
                blocked = self._send(gone)
                all_left = self._free_link(gone)
                self._check_losses(gone, time.monotonic())
                if closing and (not blocked or time.monotonic() > give_up_s):
                    return
                self._receive(RETRY_S if blocked or not all_left else POLL_S)
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self.fail(
                as_server_error(
                    error, f"the connections of worker {self.session.rank} to the others failed"
                )
            )

    def _send(self, lost: Collection[int]) -> bool:
        """Send what the peers' queues take; returns whether anything is left."""
        blocked = False
        for peer, outbox in enumerate(self._outboxes):
            if peer in lost:
                outbox.clear()  # ZeroMQ would keep it for a peer that comes back
            blocked = not self._send_to(peer, outbox) or blocked
        return blocked

    def _send_to(self, peer: int, outbox: Outbox) -> bool:
        """Send a peer what its queue takes; returns whether that was all."""
        assert self._sending is not None
        while True:
            with self.monitor:  # `broadcast` adds to it
                if not outbox:
                    return True
                waiting, began_ns = outbox.take(), self._trace.now()
            if not self._sending.send(peer, waiting.frames):
                with self.monitor:
                    outbox.put_back(waiting)
                return False
            if 0 <= waiting.table < LAST:
                name = self.session.tables[waiting.table].name
                self._trace.span(Track.FACTORS, "send", name, began_ns, worker=self._others[peer])

    def _free_link(self, lost: Collection[int]) -> bool:
        """Free the link if all has left this host; returns whether it has."""
        assert self._sending is not None
        with self.monitor:  # `broadcast` takes the link
            unsent = [
                len(outbox) + self._sending.unsent(peer)
                for peer, outbox in enumerate(self._outboxes)
                if peer not in lost
            ]
            all_left = self.monitor.failure is not None or not any(unsent)
            if all_left:
                self._link.free()
        return all_left

    def _check_losses(self, lost: Collection[int], now: float) -> None:
        """Fail once a connection has ended without `Leave`.

        Raises:
            PeerLost: names the worker.
        """
        assert self._sending is not None
        for peer in lost:
            rank = self._others[peer]
            if rank not in self._left and now - self._lost_s.setdefault(rank, now) >= LEAVE_S:
                raise PeerLost(
                    f"worker {self.session.rank} lost {self._sending.describe_loss(peer)} (worker "
                    f"{rank})"
                )

    def _receive(self, timeout_s: float) -> None:
        batch = self._listening.receive(timeout_s)
        if not batch:
            return
        with self.monitor:
            for peer, frames in batch:
                try:
                    self._handle(peer, frames)
                except RemoteProtocolError:
                    self.dropped += 1
            self.monitor.notify()

    def _handle(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        began_ns = self._trace.now()
        if peer not in self._ranks and len(frames) != 1:
            raise RemoteProtocolError("an unknown peer sent more than a join")
        message = decode(frames, self.session.tables)
        if isinstance(message, Factors):
            if peer not in self._ranks:
                raise RemoteProtocolError("an unknown peer sent factors")
            self.session.receive(self._ranks[peer], message)
            self.bytes_in[message.table] += message.pair.u.nbytes + message.pair.v.nbytes
            name, sender = self.session.tables[message.table].name, self._ranks[peer]
            self._trace.span(
                Track.FACTORS, "receive", name, began_ns, worker=sender, clock=message.clock
            )
            return
        if isinstance(message, Leave):
            if peer not in self._ranks:
                raise RemoteProtocolError("an unknown peer sent a leave")
            self._left.add(self._ranks[peer])
            return
        if not hmac.compare_digest(message.token, self._network.token):
            raise RemoteProtocolError("a peer's token is not this job's")
        if message.rank not in self._others or message.rank in self._ranks.values():
            raise RemoteProtocolError(f"a peer joins as worker {message.rank}")
        self._ranks[peer] = message.rank
        if len(self._ranks) == len(self._others):
            self._listening.admit_no_more()
