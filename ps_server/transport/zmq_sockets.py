"""The contract over ZeroMQ: a ROUTER on the shard, one DEALER for each shard on the worker.

Queues are short in both directions. Messages to be sent wait with the sender, where urgent ones can
overtake; received ones that waited would leave the processor's cache before they are handled.
Received frames are views of ZeroMQ's own memory, which has no other user; sent arrays are not
copied either.

A blocked DEALER has an event when it can send again. A ROUTER has one only when all its peers
block; otherwise it is tried again as often as its peers have taken messages lately (`retries.py`).

The loss of a connection is final, and noticed within seconds; see `losses.py`.

With keys both sides authenticate themselves, and all frames are encrypted; see `sealed_ends.py`. A
packet is then sealed after ZeroMQ has taken its first part, because a number is used only once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from ps_server.errors import PacketsMissing, PeerLost, RemoteProtocolError, TransportError
from ps_server.keys import Keyring
from ps_server.transport.authenticator import USER, Authenticator, introduce
from ps_server.transport.base import MAX_BATCH, Buffer, Frames
from ps_server.transport.first_connections import ConnectLimit, FirstConnections
from ps_server.transport.listening import Listening
from ps_server.transport.losses import LossWatch, keep_alive
from ps_server.transport.retries import Retries
from ps_server.transport.sealed_sending import SentMemory, send_sealed

if TYPE_CHECKING:
    from ps_server.transport.sealed_ends import ConnectingEnd, ListeningEnd

MAX_FRAME_BYTES = 2**31
"""Longest frame that is accepted; a peer that sends more is disconnected before memory is taken."""
LINGER_MS = 2_000
SEND_MESSAGES = 2
"""Messages that wait for a peer within ZeroMQ, beside what the kernel holds."""
RECEIVE_MESSAGES = 4
"""Messages of a peer that have come and wait to be received."""
SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel holds for a peer: what is on the way at 10 Gbit/s in a round trip of 0.1 ms,
and a host has several peers. More only fills the queues of switches, until they drop: with 512
KiB an iteration took a tenth longer at 250 Mbit/s.
"""
SOCKETS_A_CONNECTION = 3
"""ZeroMQ's of a client: one that connects, and both ends of its monitor (`losses.py`)."""
CHECK_S = 0.25
"""How often connections are checked that `receive` does not wait for: whether they are lost, and
whether peers try to connect that are no longer admitted. To wait for all of them in every turn
would cost more than the turn.
"""
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
_WRITABLE = int(zmq.POLLOUT)
"""Plain numbers: pyzmq's own flags are combined in Python, in many times the time."""


class _Waker:
    """A pipe that makes a poll return. Whoever polls looks at what is new after `clear`.

    Law: nothing is written after `close`: the pipe's number may be another file's by then.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the handler of a signal may wake, too
        self._is_written = False  # several wakes before a poll returns write once
        self._is_closed = False
        self.read_end, self._write_end = os.pipe()

    def wake(self) -> None:
        with self._lock:
            if not (self._is_written or self._is_closed):
                self._is_written = True
                os.write(self._write_end, b"\0")

    def clear(self) -> None:
        with self._lock:
            if self._is_written:
                os.read(self.read_end, 1)
                self._is_written = False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.read_end)
            os.close(self._write_end)


@contextlib.contextmanager
def _opening(what: str) -> Iterator[None]:
    """Turn the error of a socket that cannot be made into a sentence.

    Args:
        what: the sockets are for.
    """
    try:
        yield
    except zmq.ZMQError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        more = (
            f"; ulimit -n allows {limit}, set a higher limit" if error.errno == errno.EMFILE else ""
        )
        raise TransportError(
            f"cannot open the sockets of {what}: {_reason(error)}{more}"
        ) from error


def _configured(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, send_buffer_bytes: int
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, SEND_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
    socket.setsockopt(zmq.SNDBUF, send_buffer_bytes)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    keep_alive(socket)
    return socket


class ZmqServerTransport:
    """A `ServerTransport`: a ROUTER bound to `address` (`tcp://host:port`; port 0: a free one).

    Args:
        address: where to listen.
        keys: own pair, and the public keys to admit; None: all peers, in clear.

    Raises:
        TransportError: the address cannot be bound, with the reason (in use, no such interface,
            ...).
    """

    def __init__(self, address: str, keys: Keyring | None = None) -> None:
        self._listening = Listening(address, send_buffer_bytes=SEND_BUFFER_BYTES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sealed = _listening_end(keys) if keys else None
        self._memory = SentMemory()
        with _opening(address):
            self._socket = _configured(self._context, zmq.ROUTER, address, SEND_BUFFER_BYTES)
            self._authenticator = Authenticator(
                self._socket, self._listening, self._sealed.admit if self._sealed else None
            )
        # a message to a full peer is an error, not dropped
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if not self._sealed:
            # Of strangers with one name the last stays: others would not be read, nor ever end.
            # Peers have names that ZeroMQ chooses, and nobody is told.
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.USE_FD, self._listening.descriptor())
        self._socket.bind(self._listening.address)
        self._peers: set[bytes] = set()
        self._blocked: Retries[bytes] = Retries()
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._watched = frozenset(self._authenticator.sockets)
        self._check_at_s = 0.0
        for waited in (self._socket, self._waker.read_end, *self._watched):
            self._poller.register(waited, _READABLE)

    @property
    def address(self) -> str:
        """Where clients reach this end, with the real port."""
        return self._listening.address

    @property
    def refused(self) -> int:
        return self._authenticator.refused + (self._sealed.unproved if self._sealed else 0)

    @property
    def connections(self) -> int:
        self._authenticator.process()
        return self._authenticator.connections

    def admit_no_more(self) -> None:
        if not self._watched:
            return
        self._authenticator.admit_no_more()
        for socket in self._watched:
            self._poller.unregister(socket)
        self._watched = frozenset()
        self._check_at_s = time.monotonic()

    def known(self, peer: bytes) -> None:
        self._authenticator.known(peer)

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            woken = self._wait(max(0.0, deadline_s - time.monotonic()))
            batch, refused = self._take()
            if batch or woken or not refused or self._blocked.peers:
                return batch
            if time.monotonic() >= deadline_s:
                return batch

    def _take(self) -> tuple[list[tuple[bytes, Frames]], int]:
        """Return what has come, and the number of messages that are not for the protocol above."""
        batch: list[tuple[bytes, Frames]] = []
        for count in range(MAX_BATCH):
            try:
                name, *parts = _receive(self._socket)
            except zmq.Again:
                if self._watched:
                    self._authenticator.drained()
                return batch, count - len(batch)
            peer, buffers = name.bytes, [part.buffer for part in parts]
            frames: Sequence[Buffer] = buffers
            if self._watched:
                self._authenticator.spoke(peer, name)
            if self._sealed and parts:  # a name alone is dropped
                frames = self._open(self._sealed, peer, str(parts[0].get(USER)).encode(), buffers)
            if frames:
                batch.append((peer, frames))
        return batch, MAX_BATCH - len(batch)

    def _open(
        self, sealed: ListeningEnd, peer: bytes, session: bytes, parts: list[memoryview]
    ) -> Sequence[Buffer]:
        """Return the frames of a packet; none where it is part of the handshake, or refused."""
        second = sealed.knock(session, parts)
        if second is not None:
            with contextlib.suppress(zmq.ZMQError):  # it has gone
                self._socket.send_multipart([peer, second], _NOBLOCK)
            return ()
        try:
            frames = sealed.receive(session, peer, parts)
        except PacketsMissing:
            self.send(peer, ())  # tells it so
        except RemoteProtocolError:
            pass
        else:
            self._authenticator.known(peer)
            return frames
        self._authenticator.refused += 1
        return ()

    def _wait(self, timeout_s: float) -> bool:
        """Wait until something has come, or it is worth trying again to send to a peer that
        blocked; returns whether `wake` was called.
        """
        all_block = bool(self._blocked.peers) and self._blocked.peers == self._peers
        self._poller.register(self._socket, _READABLE | (_WRITABLE if all_block else 0))
        left_s = timeout_s if all_block else min(timeout_s, self._blocked.wait_s(time.monotonic()))
        woken = self._waker.read_end in self._poll(math.ceil(left_s * 1000))
        if woken:
            self._waker.clear()
        if time.monotonic() >= self._check_at_s:
            self._check_at_s = time.monotonic() + CHECK_S
            self._authenticator.process()
            for peer in self._sealed.overdue() if self._sealed else ():
                self.send(peer, ())  # tells it so
        if all_block:
            self._blocked.try_all()
        return woken

    def _poll(self, timeout_ms: int) -> set[Any]:
        """Return which sockets have events, except authentication's, which are handled here."""
        deadline = time.monotonic() + timeout_ms / 1000
        ready = {socket for socket, _ in self._poller.poll(timeout_ms)}
        while ready & self._watched:
            self._authenticator.process()
            ready -= self._watched
            if not ready and (left_ms := round((deadline - time.monotonic()) * 1000)) > 0:
                ready = {socket for socket, _ in self._poller.poll(left_ms)}
        return ready

    def blocks(self, peer: bytes) -> bool:
        return self._blocked.is_early(peer, time.monotonic())

    def send(self, peer: bytes, frames: Frames) -> bool:
        sealer = self._sealed and self._sealed.sealer(peer)
        try:
            if sealer:
                self._socket.send(peer, _MORE)
                send_sealed(self._socket, sealer, frames, self._memory)
            elif not self._sealed:
                _send(self._socket, [peer, *frames])
        except zmq.Again:
            self._blocked.add(peer, time.monotonic())
            return False
        except zmq.ZMQError:  # the peer has gone: its launcher handles that
            self._peers.discard(peer)
            self._blocked.forget(peer)
        else:
            self._blocked.taken(peer, time.monotonic())
            self._peers.add(peer)  # only peers that messages are sent to
        return True

    def wake(self) -> None:
        self._waker.wake()

    def close(self, *, drops: bool = False) -> None:
        self._listening.close()
        self._authenticator.close()
        self._socket.close(linger=0 if drops else LINGER_MS)
        self._context.term()
        self._waker.close()


class ZmqClientTransport:
    """A `ClientTransport`: a DEALER for each shard address, in shard order.

    Args:
        addresses: where to connect to.
        keys: own pair, and the public key to expect at each address; None: any peer, in clear.
        send_buffer_bytes: what the kernel holds for each; of connections over one link, those with
            more get more of it.
        tracked: whether `unsent` is used.
        limit: of the first connections, which `receive` and `lost` keep; None: they are waited for.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keyring | None = None,
        *,
        send_buffer_bytes: int = SEND_BUFFER_BYTES,
        tracked: bool = False,
        limit: ConnectLimit | None = None,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.read_end, _READABLE)
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_A_CONNECTION * max(1, len(addresses)))
        with _opening(f"{len(addresses)} connections"):
            self._sockets = [
                _configured(self._context, zmq.DEALER, address, send_buffer_bytes)
                for address in addresses
            ]
            self._losses = LossWatch(self._sockets)
        self._index = {socket: shard for shard, socket in enumerate(self._sockets)}
        self._first = FirstConnections(addresses, limit, time.monotonic())
        self._memory = SentMemory()
        self._sealed = _connecting_ends(keys, len(addresses)) if keys else []
        self._check_at_s = 0.0
        for shard, (socket, address) in enumerate(zip(self._sockets, addresses, strict=True)):
            try:
                if self._sealed:
                    introduce(socket, self._sealed[shard].first)
                socket.connect(address)
                if self._sealed:
                    socket.send(b"", _NOBLOCK)  # asks for the second message of the handshake
            except zmq.ZMQError as error:
                self.close()
                raise TransportError(f"cannot connect to {address}: {_reason(error)}") from error
            self._poller.register(socket, _READABLE)
        self._blocked: set[int] = set()
        self._trackers: list[deque[zmq.MessageTracker]] = [deque() for _ in addresses if tracked]
        """Of what ZeroMQ has taken, where the transport is tracked."""

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        batch: list[tuple[int, Frames]] = []
        for socket, events in self._ready(timeout_s):
            shard = self._index.get(socket)
            if shard is None:
                self._waker.clear()
                continue
            if shard in self._blocked and events & _WRITABLE:
                self._unblock(shard)
            while events & _READABLE and len(batch) < MAX_BATCH:
                try:
                    frames = self._receive(shard)
                except zmq.Again:
                    break
                if frames:
                    batch.append((shard, frames))
        # messages that came before a loss are returned first
        if not batch and (lost := self._losses.lost):
            raise PeerLost(f"lost {self.describe_loss(min(lost))} (shard {min(lost)})")
        return batch

    def _receive(self, shard: int) -> Sequence[Buffer]:
        """Return the frames of a message; none where it is part of the handshake, or refused."""
        parts = [part.buffer for part in _receive(self._sockets[shard])]
        if not self._sealed:
            return parts
        agreed = self._agreed(shard)
        try:
            frames = self._sealed[shard].receive(parts)
        except PacketsMissing:
            self._losses.lost.add(shard)
        except RemoteProtocolError:
            if not agreed:  # a damaged handshake: no other comes
                self._losses.lost.add(shard)
        else:
            if not agreed:
                self.send(shard, ())  # proves that this end has the keys
            return frames
        return ()

    def _agreed(self, shard: int) -> bool:
        return not self._sealed or self._sealed[shard].sealer is not None

    def _agree(self, shard: int) -> bool:
        """Read the second message of the handshake if it has come; returns whether it has."""
        with contextlib.suppress(zmq.Again):
            while not self._agreed(shard):
                self._receive(shard)
        return self._agreed(shard)

    def _ready(self, timeout_s: float) -> list[tuple[Any, int]]:
        """Return which sockets can be read, or be written to again; check the connections once
        in a while.
        """
        deadline_s, now_s = time.monotonic() + timeout_s, time.monotonic()
        while True:
            left_s = max(0.0, min(deadline_s, self._check_at_s) - now_s)
            ready: list[tuple[Any, int]] = self._poller.poll(math.ceil(left_s * 1000))
            now_s = time.monotonic()
            if now_s >= self._check_at_s:
                self._check_at_s = now_s + CHECK_S
                self._process()
                self._losses.check_silence()
                overdue = (shard for shard, end in enumerate(self._sealed) if end.is_overdue())
                self._losses.lost.update(overdue)
            if ready or self._losses.lost or now_s >= deadline_s:
                return ready

    @property
    def lost(self) -> frozenset[int]:
        """The shards whose connections stood and are lost."""
        self._process()
        now_s = time.monotonic()
        if self._trackers and now_s >= self._check_at_s:  # an end that does not call `receive`
            self._check_at_s = now_s + CHECK_S
            for shard in range(len(self._sealed)):
                with contextlib.suppress(zmq.Again):
                    while True:  # that the other end misses packets
                        self._receive(shard)
        return frozenset(self._losses.lost)

    def _process(self) -> None:
        self._losses.process()
        self._first.check(self._losses.reached, time.monotonic())

    def done_with(self, shard: int) -> None:
        self._losses.forget(shard)

    def describe_loss(self, shard: int) -> str:
        """Return a loss as a part of a sentence."""
        return f"the connection to {self._first.addresses[shard]}: the process there has ended, or the network has failed"

    def blocks(self, shard: int) -> bool:
        if not self._agree(shard):
            return True
        # reading the event costs far less than a failed attempt
        takes = bool(int(self._sockets[shard].getsockopt(_EVENTS)) & _WRITABLE)
        if takes == (shard in self._blocked):
            (self._unblock if takes else self._block)(shard)
        return not takes

    def send(self, shard: int, frames: Frames) -> bool:
        if not self._agree(shard):
            return False
        sealer = self._sealed[shard].sealer if self._sealed else None
        try:
            if sealer:
                tracker = send_sealed(
                    self._sockets[shard], sealer, frames, self._memory, tracked=bool(self._trackers)
                )
                if tracker:
                    self._trackers[shard].append(tracker)
            elif self._trackers:
                last = zmq.Frame(frames[-1], track=True, copy=False)
                _send(self._sockets[shard], [*frames[:-1], last])
                self._trackers[shard].append(last.tracker)
            else:
                _send(self._sockets[shard], frames)
        except zmq.Again:
            self._block(shard)
            return False
        if shard in self._blocked:
            self._unblock(shard)
        return True

    def unsent(self, shard: int) -> int:
        """Return how many messages ZeroMQ has taken whose last frame the kernel
        has not (encrypted: has not been begun).
        """
        assert self._trackers, "the transport is not `tracked`"
        trackers = self._trackers[shard]
        while trackers and trackers[0].done:
            trackers.popleft()
        return len(trackers)

    def _block(self, shard: int) -> None:
        self._blocked.add(shard)
        self._poller.modify(self._sockets[shard], _READABLE | _WRITABLE)

    def _unblock(self, shard: int) -> None:
        self._blocked.discard(shard)
        self._poller.modify(self._sockets[shard], _READABLE)

    def wake(self) -> None:
        self._waker.wake()

    def close(self, *, drops: bool = False) -> None:
        self._losses.process()
        # ZeroMQ would wait for a process that has ended to come back
        gone = self._losses.lost
        self._losses.close()
        for shard, socket in enumerate(self._sockets):
            hopeless = drops or shard in gone or not self._agreed(shard)
            socket.close(0 if hopeless else None)
        self._context.term()
        self._waker.close()


class ZmqWire:
    """The `Wire` over ZeroMQ.

    Args:
        limit, send_buffer_bytes, tracked: of ends that connect; see `ZmqClientTransport`.
    """

    near = False

    def __init__(
        self,
        limit: ConnectLimit | None = None,
        send_buffer_bytes: int = SEND_BUFFER_BYTES,
        *,
        tracked: bool = False,
    ) -> None:
        self._limit, self._send_buffer_bytes, self._tracked = limit, send_buffer_bytes, tracked

    def listen(self, host: str, keys: Keyring | None) -> ZmqServerTransport:
        return ZmqServerTransport(f"tcp://{host}:0", keys)

    def connect(self, addresses: Sequence[str], keys: Keyring | None) -> ZmqClientTransport:
        return ZmqClientTransport(
            addresses,
            keys,
            send_buffer_bytes=self._send_buffer_bytes,
            tracked=self._tracked,
            limit=self._limit,
        )

    def now(self) -> float:
        return time.monotonic()


def _send(socket: zmq.Socket[bytes], frames: Sequence[Buffer | zmq.Frame]) -> None:
    """Send a message in pieces.

    (pyzmq's own `send_multipart` combines its flags again for each of them.)
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=False)
    socket.send(frames[-1], _NOBLOCK, copy=False)


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    frames = [socket.recv(_NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOBLOCK, copy=False))
    return frames


def _listening_end(keys: Keyring) -> ListeningEnd:
    from ps_server.transport.sealed_ends import ListeningEnd  # in clear nothing needs cryptography

    return ListeningEnd(keys)


def _connecting_ends(keys: Keyring, shards: int) -> Sequence[ConnectingEnd]:
    from ps_server.transport.sealed_ends import ConnectingEnd

    return [ConnectingEnd(keys, shard) for shard in range(shards)]


def _reason(error: zmq.ZMQError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
