"""The contract over ZeroMQ: a ROUTER on the shard, one DEALER for each shard on the worker.

Queues are short in both directions. What waits to be sent waits with the sender, where urgent messages can overtake;
what was received and waits to be looked at would leave the processor's cache before it is. Received frames are views
of ZeroMQ's own memory, which nobody else uses; sent arrays are not copied either.

A blocked DEALER says when it can send again. A ROUTER says so only when all its peers block; otherwise it is tried
again every `RETRY_MS`, in which a link of 1 GB/s does not run dry.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import zmq

from ps_server.errors import TransportError
from ps_server.transport.base import MAX_BATCH, Frames

MAX_FRAME_BYTES = 2**31
"""Longest frame that is accepted; a peer that sends more is disconnected before memory is taken."""
LINGER_MS = 2_000
SEND_MESSAGES = 2
"""Messages that wait for a peer within ZeroMQ, beside what the kernel holds."""
RECEIVE_MESSAGES = 4
"""Messages of a peer that have come and wait to be received."""
SEND_BUFFER_BYTES = 512 * 1024
"""What the kernel holds for a peer: enough for 10 Gbit/s at a round trip of 0.4 ms, and small enough for its cache."""
RETRY_MS = 2


class _Waker:
    """A pipe that makes a poll return."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        os.set_blocking(self._write_end, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: a wake is pending; closed: nobody waits
            os.write(self._write_end, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.read_end, 4096)

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._write_end)


def _configured(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, SEND_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
    socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    return socket


class ZmqServerTransport:
    """A ROUTER bound to `address` (`tcp://host:port`; port 0 takes a free one).

    Raises:
        TransportError: the address cannot be bound, with the reason (in use, no such interface, ...).
    """

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _configured(self._context, zmq.ROUTER, address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full peer is an error to be told, not dropped
        try:
            self._socket.bind(address.replace(":0", ":*") if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            raise TransportError(f"cannot listen on {address}: {_reason(error)}") from error
        self._address = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        self._peers: set[bytes] = set()
        self._blocked: set[bytes] = set()
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.read_end, zmq.POLLIN)

    @property
    def address(self) -> str:
        """Where clients reach this end, with the real port."""
        raw = self._address
        return (raw if isinstance(raw, bytes) else str(raw).encode()).rstrip(b"\0").decode()

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """See `ServerTransport`."""
        self._wait(timeout_s)
        batch: list[tuple[bytes, Frames]] = []
        while len(batch) < MAX_BATCH:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = name.bytes
            self._peers.add(peer)
            batch.append((peer, [frame.buffer for frame in frames]))
        return batch

    def _wait(self, timeout_s: float) -> None:
        """Until something has come, or it is worth trying again to send to a peer that blocked."""
        all_block = bool(self._blocked) and self._blocked == self._peers
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if all_block else 0))
        timeout_ms = round(timeout_s * 1000)
        self._poller.poll(min(timeout_ms, RETRY_MS) if self._blocked and not all_block else timeout_ms)
        self._waker.clear()
        self._blocked.clear()

    def send(self, peer: bytes, frames: Frames) -> bool:
        """See `ServerTransport`."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._blocked.add(peer)
            return False
        except zmq.ZMQError:  # a peer that has gone: its launcher deals with that
            self._peers.discard(peer)
        return True

    def wake(self) -> None:
        """See `ServerTransport`."""
        self._waker.wake()

    def close(self) -> None:
        """See `ServerTransport`."""
        self._socket.close()
        self._context.term()
        self._waker.close()


class ZmqClientTransport:
    """A DEALER for each shard address, in shard order."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.read_end, zmq.POLLIN)
        self._sockets = [_configured(self._context, zmq.DEALER, address) for address in addresses]
        self._index = {socket: shard for shard, socket in enumerate(self._sockets)}
        for socket, address in zip(self._sockets, addresses, strict=True):
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                self.close()
                raise TransportError(f"cannot connect to {address}: {_reason(error)}") from error
            self._poller.register(socket, zmq.POLLIN)
        self._blocked: set[int] = set()

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """See `ClientTransport`."""
        ready = self._poller.poll(round(timeout_s * 1000))
        self._waker.clear()
        batch: list[tuple[int, Frames]] = []
        for socket, events in ready:
            shard = self._index.get(socket)
            if shard is not None and events & zmq.POLLOUT:
                self._blocked.discard(shard)
                self._poller.modify(socket, zmq.POLLIN)
            while shard is not None and len(batch) < MAX_BATCH:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                batch.append((shard, [frame.buffer for frame in frames]))
        return batch

    def send(self, shard: int, frames: Frames) -> bool:
        """See `ClientTransport`."""
        try:
            self._sockets[shard].send_multipart(list(frames), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._blocked.add(shard)
            self._poller.modify(self._sockets[shard], zmq.POLLIN | zmq.POLLOUT)
            return False
        if shard in self._blocked:
            self._blocked.discard(shard)
            self._poller.modify(self._sockets[shard], zmq.POLLIN)
        return True

    def wake(self) -> None:
        """See `ClientTransport`."""
        self._waker.wake()

    def close(self) -> None:
        """See `ClientTransport`."""
        for socket in self._sockets:
            socket.close()
        self._context.term()
        self._waker.close()


def _reason(error: zmq.ZMQError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
