"""The thread of a client that moves messages between its transport and its session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ps_server.errors import as_server_error
from ps_server.meters import ClientMeter
from ps_server.monitor import Monitor, owned_thread
from ps_server.protocol.frames import decode
from ps_server.protocol.messages import Addressed, Leave, MemoryAnswer, Message, Push, Value
from ps_server.protocol.schedule import PACKET_BYTES, PACKET_IN_MEMORY_BYTES, LinkPriority, Schedule
from ps_server.protocol.worker_session import Session
from ps_server.shared_memory import WorkerSharedMemory
from ps_server.trace import Tracer, Track, trace_message
from ps_server.transport.base import ClientTransport

POLL_S = 0.5
LINGER_S = 12.0
"""How long `close` tries to send what is queued, and waits for the shards' answers: until a link
that is down counts as lost (`losses.py`).
"""


class Pump:
    """Sends what is queued for each shard, and hands what arrives to the session.

    In shared memory a packet costs the same with one push or with many. So pushes to shards of this
    machine wait for each other: until there are `PACKET_IN_MEMORY_BYTES`, anything else is sent, or
    the worker waits for a value; at most `POLL_S`.

    Attributes:
        session, meter: of the client; changed under the monitor.

    Args:
        session: of the client.
        transport: of the client; this closes it.
        shared_memory: in which large arrays reach shards of this host.
        monitor: of the client; it holds the session's and the queues' lock.
        trace: records each message sent and received.
        clock: returns the seconds of a clock that is never set.
    """

    def __init__(
        self,
        session: Session,
        transport: ClientTransport,
        shared_memory: WorkerSharedMemory,
        monitor: Monitor,
        trace: Tracer,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self._transport = transport
        self._shared_memory = shared_memory
        self._monitor = monitor
        self.meter = ClientMeter(session.store, clock)
        self._trace = trace
        self._clock = clock
        self.queues = [Schedule() for _ in range(session.store.shards)]
        self._waiting_bytes = 0
        """Of pushes that wait for others; from `PACKET_IN_MEMORY_BYTES` on all is sent."""
        self._link = LinkPriority()
        self._thread = owned_thread(f"ps-client-{session.seat.rank}", self._run, self._fail)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def follow(self, session: Session) -> None:
        """Hand what arrives to a session of another store, and count its tables.

        The caller holds the monitor.
        """
        self.session = session
        self.meter = ClientMeter(session.store, self._clock)

    def add(self, outgoing: Sequence[Addressed]) -> bool:
        """Queue messages. The caller holds the monitor, and calls `wake` after it where this
        returns True.
        """
        for shard, message in outgoing:
            self.queues[shard].add(message)
            if isinstance(message, Push) and self._shared_memory.reaches(shard):
                self._waiting_bytes += message.array.nbytes
            else:
                self._waiting_bytes += PACKET_IN_MEMORY_BYTES
        return self._waiting_bytes >= PACKET_IN_MEMORY_BYTES

    def wake(self) -> None:
        """Let the thread send all that is queued."""
        self._waiting_bytes += PACKET_IN_MEMORY_BYTES
        self._transport.wake()

    def hurry(self) -> None:
        """Send the pushes that wait for others."""
        if self._waiting_bytes:
            self.wake()

    def yield_link(self, link: LinkPriority) -> None:
        """See `Client.yield_link`."""
        link.when_free(self._wake_unless_closed)
        self._link = link  # only now may the thread wait for it

    def close(self) -> None:
        """Wait until the thread has sent what is left, and close the transport.

        The monitor is closed before. Nothing is sent any more after an interruption.
        """
        self._transport.wake()
        self._thread.join()
        self._transport.close(drops=self._monitor.interrupted)

    def _wake_unless_closed(self) -> None:
        with self._monitor:
            if not self._monitor.closed:  # the transport may be closed
                self._transport.wake()

    def _run(self) -> None:
        for _ in self.steps():
            pass

    def _fail(self, error: Exception) -> None:
        what = f"the connection of worker {self.session.seat.rank} failed"
        self._monitor.fail(as_server_error(error, what))

    def steps(self) -> Iterator[float]:
        """Move messages until the monitor is closed; yield before each wait for messages the most
        seconds that it lasts.
        """
        while not self._monitor.closed:
            wait_s = self._release()
            self._send_waiting()
            yield wait_s
            self._receive(wait_s)
        if not self._monitor.interrupted:
            yield from self._send_rest()

    def _release(self) -> float:
        """Queue what the budget allows of the changes that are held back; returns the seconds
        until it allows more.
        """
        changes = self.session.changes
        if changes.log is None:
            return POLL_S
        with self._monitor:
            self.add(changes.release(self._clock(), self.session.clock))
            wait_s = changes.log.wait_s(self._clock())
        return POLL_S if wait_s is None else min(wait_s, POLL_S)

    def _send_rest(self) -> Iterator[float]:
        deadline = self._clock() + min(LINGER_S, self._monitor.timeout_s)
        self._send_waiting()
        # A connection that closes with values unread takes what is on its way to the shard with it.
        while (any(self.queues) or self.session.stays_on) and self._clock() < deadline:
            yield POLL_S
            self._receive(POLL_S)
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send as much as the transport takes."""
        if self._waiting_bytes < PACKET_IN_MEMORY_BYTES and not self._monitor.closed:
            return
        free = self._monitor.closed or self._link.is_free
        for shard, queue in enumerate(self.queues):
            pushes = free or self._shared_memory.reaches(shard)
            while (
                queue
                and not self._transport.blocks(shard)
                and self._send_packet(shard, queue, pushes)
            ):
                pass
        with self._monitor:
            if not any(self.queues):
                self._waiting_bytes = 0

    def _send_packet(self, shard: int, queue: Schedule, pushes: bool) -> bool:
        with self._monitor:
            in_memory = self._shared_memory.reaches(shard)
            most_bytes = PACKET_IN_MEMORY_BYTES if in_memory else PACKET_BYTES
            packet = queue.take(most_bytes, pushes=pushes)
        if not packet:
            return False
        began_ns = self._trace.now()
        parts = [(waiting.message, waiting.on_the_wire()) for waiting in packet]
        frames = [frame for _, frames in parts for frame in frames]
        if not self._shared_memory.send(shard, frames, self._transport.send):
            with self._monitor:
                queue.put_back(packet)
            return False
        for message, frames in parts:
            self.meter.sent(message, frames)
            self._record(Track.SEND, shard, message, began_ns)
        return True

    def _receive(self, timeout_s: float) -> None:
        batch = self._transport.receive(timeout_s)
        if not batch:
            self._waiting_bytes += PACKET_IN_MEMORY_BYTES
        for shard, frames in batch:
            began_ns = self._trace.now()
            received = decode(self._shared_memory.receive(shard, frames))
            for message, parts in received:
                self.meter.received(message, parts)
                if isinstance(message, Value):
                    self.session.values.land(shard, message)
            with self._monitor:
                for message, _ in received:
                    if isinstance(message, MemoryAnswer):
                        self._shared_memory.answered(shard, message)
                    else:
                        self.add(self.session.receive(shard, message))
                        if isinstance(message, Leave):
                            self._transport.done_with(shard)
                self._monitor.notify()
            for message, _ in received:
                self._record(Track.RECEIVE, shard, message, began_ns)

    def _record(self, track: Track, shard: int, message: Message, began_ns: int) -> None:
        trace_message(self._trace, track, message, self.session.store.tables, began_ns, shard=shard)
