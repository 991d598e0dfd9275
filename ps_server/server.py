"""A shard on a transport: one thread that moves frames between the two. Decides nothing."""

from __future__ import annotations

import threading

from ps_server.errors import RemoteProtocolError
from ps_server.messages import Message
from ps_server.shard import Outgoing, Shard
from ps_server.transport.base import Frames, ServerTransport
from ps_server.wire import decode, encode

POLL_S = 0.5


class Server:
    """Serves one shard until every worker has left, or `stop` is called.

    Args:
        shard: the state machine.
        transport: where its peers are. The server owns it and closes it.
    """

    def __init__(self, shard: Shard, transport: ServerTransport) -> None:
        self.shard = shard
        self._transport = transport
        self._stopping = threading.Event()

    @property
    def address(self) -> str:
        """Where clients reach this shard."""
        return self._transport.address

    def serve(self) -> None:
        """Run in the calling thread; returns when all workers have left or `stop` was called."""
        try:
            while not (self.shard.finished or self._stopping.is_set()):
                for peer, frames in self._transport.receive(POLL_S):
                    for outgoing in self._answer(peer, frames):
                        self._transport.send(outgoing.peer, encode(outgoing.message))
        finally:
            self._transport.close()

    def _answer(self, peer: bytes, frames: Frames) -> list[Outgoing]:
        try:
            message: Message = decode(frames)
        except RemoteProtocolError as error:
            return self.shard.refuse(peer, str(error))
        return self.shard.handle(peer, message)

    def stop(self) -> None:
        """Make `serve` return soon. Any thread may call it."""
        self._stopping.set()
        self._transport.wake()
