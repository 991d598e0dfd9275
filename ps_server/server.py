"""A shard on a transport: one thread that moves frames between the two. Decides nothing."""

from __future__ import annotations

import threading
import time

from ps_server.errors import RemoteProtocolError
from ps_server.messages import Create, Message
from ps_server.shard import Outgoing, Shard
from ps_server.trace import NO_TRACE, Tracer, Track, tell_message
from ps_server.transport.base import Frames, ServerTransport
from ps_server.wire import decode, encode

POLL_S = 0.5


class Server:
    """Serves one shard until every worker has left, or `stop` is called.

    Args:
        shard: the state machine.
        transport: where its peers are. The server owns it and closes it.
        trace: told of each message received, acted upon and sent; closed by whoever made it.
    """

    def __init__(self, shard: Shard, transport: ServerTransport, *, trace: Tracer = NO_TRACE) -> None:
        self.shard = shard
        self._transport = transport
        self._trace = trace
        self._names: tuple[str, ...] = ()
        self._stopping = threading.Event()
        self._idle_limit_s: float | None = None

    @property
    def address(self) -> str:
        """Where clients reach this shard."""
        return self._transport.address

    def serve(self) -> None:
        """Run in the calling thread; returns when all workers have left or `stop` was called."""
        heard_s = time.monotonic()
        try:
            while not (self.shard.finished or self._stopping.is_set()):
                batch = self._transport.receive(POLL_S)
                for handled, (peer, frames) in enumerate(batch):
                    self._trace.count("queue", messages=len(batch) - handled)
                    for outgoing in self._answer(peer, frames):
                        self._send(outgoing)
                if batch:
                    self._trace.count("queue", messages=0)
                now = time.monotonic()
                heard_s = now if batch else heard_s
                if self._idle_limit_s is not None and now - heard_s > self._idle_limit_s:
                    return
        finally:
            self._transport.close()

    def _answer(self, peer: bytes, frames: Frames) -> list[Outgoing]:
        began_ns = self._trace.now()
        try:
            message: Message = decode(frames)
        except RemoteProtocolError as error:
            return self.shard.refuse(peer, str(error))
        if isinstance(message, Create):
            self._names = tuple(table.name for table in message.store.tables)
        tell_message(self._trace, Track.RECEIVE, message, self._names, began_ns)
        began_ns, updates = self._trace.now(), self.shard.counts.updates
        outgoing = self.shard.handle(peer, message)
        track = Track.SUM if self.shard.counts.updates == updates else Track.APPLY
        tell_message(self._trace, track, message, self._names, began_ns)
        return outgoing

    def _send(self, outgoing: Outgoing) -> None:
        began_ns = self._trace.now()
        self._transport.send(outgoing.peer, encode(outgoing.message))
        tell_message(self._trace, Track.SEND, outgoing.message, self._names, began_ns)

    def stop_when_idle(self, limit_s: float) -> None:
        """Make `serve` return once nobody has said anything for `limit_s` seconds. Any thread may call it."""
        self._idle_limit_s = limit_s

    def stop(self) -> None:
        """Make `serve` return soon. Any thread may call it."""
        self._stopping.set()
        self._transport.wake()
