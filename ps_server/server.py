"""A shard on a transport: one thread that moves frames between the two. Decides nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ps_server.errors import RemoteProtocolError, ServerError
from ps_server.meters import ServerMeter
from ps_server.protocol.fields import Buffer
from ps_server.protocol.frames import decode
from ps_server.protocol.members import Outgoing
from ps_server.protocol.messages import MemoryOffer, Message, ToWorker
from ps_server.protocol.schedule import PACKET_BYTES, PACKET_IN_MEMORY_BYTES, Schedule
from ps_server.protocol.shard import Shard
from ps_server.shared_memory import ShardSharedMemory
from ps_server.statistics import ShardStatistics
from ps_server.trace import NO_TRACE, Tracer, Track, trace_message
from ps_server.transport.base import Frames, ServerTransport

POLL_S = 0.5
MAX_FIRST_BYTES = 1024
"""Longest first message of a peer; a longer one is not decoded."""
MAX_TOKEN_BYTES = 1000
"""Longest token: with its header it fits into a first message."""
LINGER_S = 2.0
"""How long `serve` tries to send what is queued at its end."""


class Server:
    """Serves one shard until every worker has left, or `stop` is called.

    Args:
        shard: the state machine.
        transport: where its peers are. The server owns it and closes it.
        trace: records each message received, acted upon and sent; its owner closes it.
        clock: returns the seconds of a clock that is never set.
    """

    def __init__(
        self,
        shard: Shard,
        transport: ServerTransport,
        *,
        trace: Tracer = NO_TRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shard = shard
        self._transport = transport
        self._trace = trace
        self._meter = ServerMeter()
        self._clock = clock
        self._queues: dict[bytes, Schedule] = {}
        self._shared_memory = ShardSharedMemory()
        shard.allocate = self._shared_memory.allocate
        self._stopping = threading.Event()
        self._drops = False
        self._idle_limit_s: float | None = None
        self._failure: ServerError | None = None
        self.turns = 0
        """How often `serve` has received: a shard whose number does not grow hangs."""

    @property
    def address(self) -> str:
        """Where clients reach this shard."""
        return self._transport.address

    @torch.inference_mode()
    def serve(self) -> None:
        """Run in the calling thread; returns when all workers have left or `stop` was called.

        Raises:
            ServerError: what `fail` was given.
        """
        try:
            for _ in self.steps():
                pass
        finally:
            self._transport.close(drops=self._drops)
        if self._failure is not None:
            raise self._failure

    def steps(self) -> Iterator[float]:
        """Serve; yield before each wait for messages the most seconds that it lasts."""
        received_s = self._clock()
        wait_s = POLL_S
        while not (self.shard.members.finished or self._stopping.is_set()):
            yield wait_s
            batch = self._transport.receive(wait_s)
            self.turns += 1
            wait_s = self._handle(batch)
            if self.shard.members.all_here:
                self._transport.admit_no_more()
            now = self._clock()
            received_s = now if batch else received_s
            if self._idle_limit_s is not None and self._is_idle(now - received_s):
                return
        yield from self._send_rest()

    def _is_idle(self, silent_s: float) -> bool:
        assert self._idle_limit_s is not None
        return silent_s > self._idle_limit_s or not self._transport.connections

    def _handle(self, batch: Sequence[tuple[bytes, Frames]]) -> float:
        """Act upon what has come; return the seconds to wait for more."""
        self._meter.begin(len(batch))
        blocked: set[bytes] = set()
        self._send_waiting(blocked)
        for handled, (peer, frames) in enumerate(batch):
            self._trace.count("queue", messages=len(batch) - handled)
            answered = self._answer(peer, frames)
            answered |= self._add(self.shard.advance(self._clock()))
            self._meter.handled()
            if answered:
                self._send_waiting(blocked)
        if self._add(self.shard.advance(self._clock())):
            self._send_waiting(blocked)
        self._meter.end()
        if batch:
            self._trace.count("queue", messages=0)
        wait_s = self._send_in_background()
        due_s = self.shard.wait_s(self._clock())
        return wait_s if due_s is None else min(wait_s, due_s)

    def _send_in_background(self) -> float:
        """Send each peer for which nothing else is queued one packet of the background, so that
        what has come meanwhile is handled before the next one. Return the seconds to wait for it.
        """
        wait_s = POLL_S
        for peer, queue in self._queues.items():
            if (
                queue
                and queue.is_in_background
                and not self._transport.blocks(peer)
                and self._send_packet(peer, queue)
                and queue
            ):
                wait_s = 0.0
        return wait_s

    def _answer(self, peer: bytes, frames: Frames) -> bool:
        """Act upon a packet; of an unknown peer decode the rest only if the first message is a
        legal `Hello`.

        Returns whether there is something to send.
        """
        if peer in self.shard.members.ranks:
            return self._act(peer, frames)
        if not frames or memoryview(frames[0]).nbytes > MAX_FIRST_BYTES:
            return self._add(self.shard.refuse(peer, "the first message is too long"))
        answered = self._act(peer, frames[:1])
        if peer in self.shard.members.ranks:
            self._transport.known(peer)
            answered |= self._act(peer, frames[1:]) if len(frames) > 1 else False
        return answered

    def _act(self, peer: bytes, frames: Frames) -> bool:
        """Act upon messages, or refuse all of them; returns whether there is something to send."""
        began_ns = self._trace.now()
        try:
            received = decode(self._shared_memory.receive(peer, frames))
        except RemoteProtocolError as error:
            return self._add(self.shard.refuse(peer, str(error)))
        answered = False
        for message, parts in received:
            self._meter.received(parts)
            tables = self.shard.present.store.tables
            trace_message(self._trace, Track.RECEIVE, message, tables, began_ns)
            began_ns, updates = self._trace.now(), self.shard.counts.updates
            answered |= self._add(self._outgoing(peer, message))
            track = Track.SUM if self.shard.counts.updates == updates else Track.APPLY
            trace_message(self._trace, track, message, tables, began_ns)
            began_ns = self._trace.now()
        return answered

    def _outgoing(self, peer: bytes, message: Message) -> Sequence[Outgoing]:
        if not (isinstance(message, MemoryOffer) and peer in self.shard.members.ranks):
            return self.shard.handle(peer, message)
        try:
            return [Outgoing(peer, self._shared_memory.accept(peer, message))]
        except RemoteProtocolError as error:
            return self.shard.refuse(peer, str(error))

    def _add(self, outgoing: Sequence[Outgoing]) -> bool:
        """Queue messages, and share the frames of one that goes to several peers; returns
        whether there are any.
        """
        last: ToWorker | None = None
        frames: list[Buffer] = []
        for peer, message in outgoing:
            queue = self._queues.get(peer)
            if queue is None:
                queue = self._queues[peer] = Schedule()
            if message is not last:
                last, frames = message, []
            queue.add(message, frames)
        return bool(outgoing)

    def _send_waiting(self, blocked: set[bytes]) -> None:
        """Send as much as the transport takes; note in `blocked`, and skip, the peers for which
        it takes no more.
        """
        for peer, queue in self._queues.items():
            while not queue.is_in_background and peer not in blocked:
                if self._transport.blocks(peer) or not self._send_packet(peer, queue):
                    blocked.add(peer)

    def _send_packet(self, peer: bytes, queue: Schedule) -> bool:
        # values keep the shared memory: nobody waits for what is sent in the background
        send = self._transport.send if queue.is_in_background else self._send_in_memory
        in_memory = self._shared_memory.reaches(peer)
        packet = queue.take(PACKET_IN_MEMORY_BYTES if in_memory else PACKET_BYTES)
        began_ns = self._trace.now()
        parts = [(waiting.message, waiting.on_the_wire()) for waiting in packet]
        frames = [frame for _, frames in parts for frame in frames]
        if not send(peer, frames):
            queue.put_back(packet)
            return False
        for message, frames in parts:
            self._meter.sent(frames)
            tables = self.shard.present.store.tables
            trace_message(self._trace, Track.SEND, message, tables, began_ns)
        return True

    def _send_in_memory(self, peer: bytes, frames: Frames) -> bool:
        return self._shared_memory.send(peer, frames, self._transport.send)

    def _send_rest(self) -> Iterator[float]:
        """Send what is still queued, for up to `LINGER_S`."""
        if self._drops:
            return
        deadline = self._clock() + LINGER_S
        self._send_waiting(set())
        while self._has_urgent and (left_s := deadline - self._clock()) > 0:
            yield left_s
            self._transport.receive(left_s)
            self._send_waiting(set())

    @property
    def _has_urgent(self) -> bool:
        return not all(queue.is_in_background for queue in self._queues.values())

    def statistics(self) -> ShardStatistics:
        """Return what this shard has done so far. Any thread may call it."""
        counts = self.shard.counts
        return self._meter.statistics(
            updates=counts.updates,
            memory_bytes=self.shard.memory_bytes,
            refused=self._transport.refused,
            dropped=counts.faults,
        )

    def stop_when_idle(self, limit_s: float) -> None:
        """Make `serve` return once no peer is connected, or none has sent for
        `limit_s` seconds. Any thread may call it.
        """
        self._idle_limit_s = limit_s

    def fail(self, error: ServerError) -> None:
        """Make `serve` raise `error` soon. Any thread may call it."""
        self._failure = self._failure or error
        self.stop()

    def drop(self) -> None:
        """Make `serve` return at once; what is queued is dropped. Any thread may call it."""
        self._drops = True
        self.stop()

    def stop(self) -> None:
        """Make `serve` return soon. Any thread may call it."""
        self._stopping.set()
        self._transport.wake()
