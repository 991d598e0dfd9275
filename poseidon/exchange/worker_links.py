"""The connections of a worker to all others: one thread that moves messages between queues and
the sockets of a `Wire`: ZeroMQ's between hosts, Unix sockets within one (`host/unix_wire.py`).

    header   [VERSION, "Join", rank, token]        the first message of a connection
             [VERSION, "Leave"]                    the last one: its connection may end now
    message  two frames, of the owner's protocol; where another sender waits for the link, an empty
             third one, which the transport begins only when the kernel has all of the second one:
             an encrypted frame counts as sent from its beginning
             [VERSION, "Failed"] sentence          within a host: why its sender cannot continue

Each worker listens on an address of its own and is connected to every other's. A message for all is
sent in the order rank + 1, rank + 2, ..., so that no worker is the first for all others. Law: a
`Join` with the job's secret is the first message of a peer; a message that is not valid is dropped
and counted, and changes nothing. Within a host, where peers are processes of this user alone, it
ends the connections.
"""

from __future__ import annotations

import heapq
import hmac
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import msgpack

from ps_server import PeerLost, RemoteProtocolError, ServerError
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor, owned_thread
from ps_server.network import Network
from ps_server.protocol.schedule import LinkPriority
from ps_server.shared_memory import is_local
from ps_server.transport.base import Buffer, Frames, TrackedTransport
from ps_server.transport.retries import Retries
from ps_server.transport.zmq_sockets import ZmqWire

VERSION = 1
MAX_HEADER_BYTES = 1_024
POLL_S = 0.5
LOOK_S = 0.002
"""Between two looks whether all messages have left, while somebody waits for that."""
LEAVE_S = 1.0
"""How long after the end of both connections with a peer its `Leave` may be handled."""
LATE_S = 10.0
"""How long after the end of the connection to a peer its last messages may be on their way here, on
the connection that it has made: as long as a host may be silent (`losses.py`).
"""
LINGER_S = 12.0
"""How long `close` tries to send while no message leaves: until a link that is down is lost."""
SEND_BUFFER_BYTES = 512 * 1024
"""What the kernel holds for each other worker, four times what it holds for a shard, so that
factors get most of a link which the shards' values need as well; pushes wait until they have
left (`LinkPriority`).
"""

FIRST = -1
"""A priority before all others."""
LAST = 2**62
"""A priority after all others."""

LEAVE_MESSAGE: list[Buffer] = [msgpack.packb([VERSION, "Leave"])]


class QueuedMessage(NamedTuple):
    """A message in the queue of a peer, which is a heap: one with a lower priority number overtakes
    others, and those with one number keep their order. No two share a number.
    """

    priority: int
    number: int
    frames: list[Buffer]


def join_message(rank: int, token: bytes) -> list[Buffer]:
    """Return the first message of a worker."""
    return [msgpack.packb([VERSION, "Join", rank, token])]


class SendQueues:
    """What one worker sends to all others.

    Args:
        network, monitor, link, on_sent: see `WorkerLinks`.

    Attributes:
        others: the ranks of the other workers, in the order in which messages for all are sent.
        boxes: what is to be sent to each of them: heaps.
        wire: makes the connections.
        end: the connections, once made.
        flushes: how many wait until all has left.
        all_left: whether all messages are with the kernel.
    """

    end: TrackedTransport

    def __init__(
        self,
        network: Network,
        monitor: Monitor,
        link: LinkPriority | None,
        on_sent: Callable[[int, int, int], None] | None,
    ) -> None:
        self.others = [(network.rank + i) % network.size for i in range(1, network.size)]
        self.boxes: dict[int, list[QueuedMessage]] = {rank: [] for rank in self.others}
        self._peers = {rank: peer for peer, rank in enumerate(self.others)}
        limit = network.connect_limit([network.name(rank) for rank in self.others])
        self.wire = network.wire or ZmqWire(limit, SEND_BUFFER_BYTES, tracked=True)
        self._monitor = monitor
        self._link = link
        self._on_sent = on_sent
        self._blocked: Retries[int] = Retries()
        self._numbers = count()
        self.flushes = 0
        self.all_left = True

    def put(self, ranks: Sequence[int], priority: int, frames: list[Buffer]) -> None:
        """Queue a message for some others, or send it. Under the monitor, once there are
        connections.
        """
        for rank in ranks:
            if self.wire.near:
                self.end.send(self._peers[rank], frames)
                continue
            message = QueuedMessage(priority, next(self._numbers), frames)
            heapq.heappush(self.boxes[rank], message)

    def send(self, ranks: Sequence[int], priority: int, frames: list[Buffer]) -> None:
        """See `WorkerLinks`."""
        self.put(ranks, priority, frames if self._link is None else [*frames, b""])
        self.all_left = False
        if self._link is not None:
            self._link.take()

    def free(self) -> None:
        """Let others have the link. Under the monitor."""
        if self._link is not None:
            self._link.free()

    def step(self, lost: Collection[int]) -> int:
        """Send what the peers' queues take; return how many messages have not left this host.

        Args:
            lost: peers whose connections are lost.
        """
        if self.wire.near:  # also after a failure: it is said
            unsent = sum(map(self.end.unsent, self._peers.values()))
            return 0 if self._monitor.interrupted else unsent
        for peer, (rank, box) in enumerate(self.boxes.items()):
            if peer in lost:
                box.clear()  # ZeroMQ would keep it for a peer that comes back
            if not box and peer in self._blocked.peers:  # it was dropped
                self._blocked.forget(peer)
            self._send_to(peer, rank, box)
        return self._count_unsent(lost)

    def wait_s(self, unsent: int) -> float:
        """Return the most seconds until the next step.

        Args:
            unsent: messages that have not left this host.
        """
        if self.wire.near:
            return POLL_S
        wait_s = min(POLL_S, self._blocked.wait_s(self.wire.now()))
        is_awaited = self._monitor.closed or self._link is not None or self.flushes
        return min(wait_s, LOOK_S) if unsent and is_awaited else wait_s

    def _send_to(self, peer: int, rank: int, box: list[QueuedMessage]) -> None:
        while box and not self._blocked.is_early(peer, self.wire.now()):
            if self.end.blocks(peer):
                self._blocked.add(peer, self.wire.now())
                return
            with self._monitor:  # `send` adds to it
                waiting, began_ns = heapq.heappop(box), time.perf_counter_ns()
            if not self.end.send(peer, waiting.frames):
                with self._monitor:
                    heapq.heappush(box, waiting)
                self._blocked.add(peer, self.wire.now())
                return
            self._blocked.taken(peer, self.wire.now())
            if self._on_sent is not None and FIRST < waiting.priority < LAST:
                self._on_sent(waiting.priority, rank, began_ns)

    def _count_unsent(self, lost: Collection[int]) -> int:
        """Return how many messages have not left this host; free the link if all have."""
        with self._monitor:  # `send` takes the link
            unsent = sum(
                len(box) + self.end.unsent(peer)
                for peer, box in enumerate(self.boxes.values())
                if peer not in lost
            )
            all_left = self._monitor.failure is not None or not unsent
            if all_left and not self.all_left:
                self.all_left = True
                self._monitor.notify()
            if all_left:
                self.free()
        return 0 if all_left else unsent


class WorkerLinks:
    """The connections of one worker to all others.

    Args:
        network: how they reach each other; this worker listens on a free port of its host.
        monitor: guards what is to be sent and what `receive` changes; it fails with the
            connections.
        receive: takes each message of another worker, by rank, under the monitor. It raises
            `RemoteProtocolError` for one that is not valid.
        link: taken as long as anything has to leave this host: is not all with its kernel. None: no
            other sender waits for it.
        on_sent: called when a message has left its queue, with its priority, the receiver, and when
            its sending began, in nanoseconds.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        *,
        monitor: Monitor,
        receive: Callable[[int, Frames], None],
        link: LinkPriority | None = None,
        on_sent: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.dropped = 0
        self.left: set[int] = set()
        """The workers that have left."""
        self._network = network
        self._monitor = monitor
        self._deliver = receive
        self._out = SendQueues(network, monitor, link, on_sent)
        self.others = self._out.others
        """The ranks of the other workers, in the order in which messages for all are sent."""
        self._listening = self._out.wire.listen(network.host, network.keys)
        self._addresses: Sequence[str] = ()
        self._ranks: dict[bytes, int] = {}
        self._lost_s: dict[int, float] = {}
        what = f"the connections of {network.name(network.rank)} to the others failed"
        self._thread = owned_thread(name, self._run, lambda e: self.fail(as_server_error(e, what)))

    @property
    def address(self) -> str:
        """Where the others reach this worker."""
        return self._listening.address

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to every other worker; from now on messages move.

        Args:
            addresses: of all workers, by rank.
        """
        self.begin(addresses)
        self._thread.start()

    def begin(self, addresses: Sequence[str]) -> None:
        """Connect; whoever calls this makes the `steps`."""
        keys = self._network.keys
        if keys is not None:
            keys = replace(keys, expect=tuple(keys.admit[rank] for rank in self.others))
        self._out.end = self._out.wire.connect([addresses[rank] for rank in self.others], keys)
        self._addresses = addresses
        self._out.put(self.others, FIRST, join_message(self._network.rank, self._network.token))

    def neighbours(self) -> list[int]:
        """Return the other workers on this machine, once connected: it asks the system for each."""
        if self._network.wire is not None:
            return []
        return [rank for rank in self.others if is_local(self._addresses[rank])]

    def send(self, ranks: Sequence[int], priority: int, frames: list[Buffer]) -> None:
        """Send a message to some others; returns at once. Called under the monitor.

        The frames must not be written to until it is certain that every receiver has them.

        Args:
            priority: messages with a lower number overtake others; with one number they keep their
                order.
            frames: two.
        """
        self._monitor.check()
        self._out.send(ranks, priority, frames)

    def wake(self) -> None:
        """Make the thread look at what is to be sent."""
        self._listening.wake()

    def flush(self) -> None:
        """Wait until all messages are with the kernel.

        Raises:
            PeerLost: the connections have failed.
            StalenessTimeout: they did not leave in time.
        """
        with self._monitor:
            self._out.flushes += 1
        self.wake()
        try:
            self._monitor.wait_for(
                lambda: True if self._out.all_left else None, "messages have not left this host"
            )
        finally:
            with self._monitor:
                self._out.flushes -= 1

    def fail(self, error: ServerError) -> None:
        """Make every waiting and later call raise `error`; within a host, on all workers."""
        with self._monitor:
            if self._out.wire.near and not (self._monitor.failure or self._monitor.closed):
                reason = str(error).encode(errors="backslashreplace")
                self._out.put(self.others, LAST, [msgpack.packb([VERSION, "Failed"]), reason])
            self._monitor.fail(error)
            self._out.free()
        if not self._out.wire.near:  # a thread may wait for shards, which miss nobody
            self._network.interruption.interrupt(error)

    def close(self) -> None:
        """Send what is queued, and disconnect. After an interruption it drops what is queued.
        Safe to call twice.
        """
        if not self.leave():
            return
        if self._thread.ident is not None:
            self._thread.join()
        self.release()

    def leave(self) -> bool:
        """Let the steps end once all has been sent; return False where that was called before."""
        with self._monitor:
            if self._monitor.closed:
                return False
            if self._monitor.interrupted:
                for box in self._out.boxes.values():
                    box.clear()
            else:
                self._out.put(self.others, LAST, LEAVE_MESSAGE)
            self._monitor.close()
        self._listening.wake()
        return True

    def release(self) -> None:
        """Disconnect. No step is made after it."""
        drops = self._monitor.interrupted
        if self._addresses:
            self._out.end.close(drops=drops)
        self._listening.close(drops=drops)
        with self._monitor:
            self._out.free()

    def _run(self) -> None:
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[float]:
        """Move messages until all has been sent after `leave`; yield before each wait for messages
        the most seconds that it lasts.
        """
        now, give_up_s, unsent = self._out.wire.now, float("inf"), 0
        while True:
            closing = self._monitor.closed
            gone = self._out.end.lost
            before, unsent = unsent, self._out.step(gone)
            self._check_losses(gone, now())
            if closing and (give_up_s == float("inf") or unsent < before):
                give_up_s = now() + LINGER_S
            if closing and (not unsent or now() > give_up_s):
                return
            wait_s = self._out.wait_s(unsent)
            yield wait_s
            self._receive(wait_s)

    def _check_losses(self, lost: Collection[int], now: float) -> None:
        """Fail once the connections with a peer have ended without `Leave`.

        Raises:
            PeerLost: names the worker.
        """
        for peer in lost:
            rank = self.others[peer]
            if rank in self.left:
                continue
            lost_s = now - self._lost_s.setdefault(rank, now)
            # whether all workers that have not left may still be connected to this one
            all_stand = self._listening.connections >= len(self.others) - len(self.left)
            name = self._network.name(rank)
            if self._out.wire.near:
                raise PeerLost(f"{name}, on this machine, has gone")
            if lost_s >= (LATE_S if all_stand else LEAVE_S):
                own = self._network.name(self._network.rank)
                raise PeerLost(f"{own} lost {self._out.end.describe_loss(peer)} ({name})")

    def _receive(self, timeout_s: float) -> None:
        batch = self._listening.receive(timeout_s)
        if not batch:
            return
        with self._monitor:
            for peer, frames in batch:
                try:
                    self._handle(peer, frames)
                except RemoteProtocolError:
                    if self._out.wire.near:
                        raise
                    self.dropped += 1
            self._monitor.notify()

    def _handle(self, peer: bytes, frames: Frames) -> None:
        if not frames:
            raise RemoteProtocolError("a peer sent an empty message")
        if len(frames) == 1:
            self._handle_own(peer, frames[0])
        elif peer in self._ranks:
            self._deliver(self._ranks[peer], frames)
        else:
            raise RemoteProtocolError("an unknown peer sent more than a join")

    def _handle_own(self, peer: bytes, frame: Buffer) -> None:
        match read_header(frame):
            case [_, "Leave"] if peer in self._ranks:
                self.left.add(self._ranks[peer])
            case [_, "Join", int(rank), bytes(token)]:
                if not hmac.compare_digest(token, self._network.token):
                    raise RemoteProtocolError("a peer's token is not this job's")
                if rank not in self.others or rank in self._ranks.values():
                    raise RemoteProtocolError(
                        f"a peer joins {self._network.name(self._network.rank)} with rank {rank}; "
                        f"expected one of {len(self.others) + 1} workers, each once"
                    )
                self._ranks[peer] = rank
                self._listening.known(peer)
                if len(self._ranks) == len(self.others):
                    self._listening.admit_no_more()
            case _:
                raise RemoteProtocolError("a peer sent something that is neither join nor leave")


def read_header(frame: Buffer) -> list[object]:
    """Return the header of a message: a list that begins with `VERSION`.

    Raises:
        RemoteProtocolError: the frame is not a header.
    """
    if memoryview(frame).nbytes > MAX_HEADER_BYTES:
        raise RemoteProtocolError("a peer's header is too long")
    header = unpacked(frame)
    if (
        not isinstance(header, list)
        or not header
        or type(header[0]) is not int
        or header[0] != VERSION
    ):
        raise RemoteProtocolError(f"a peer does not use version {VERSION} of the workers' protocol")
    return header


def unpacked(frame: Buffer) -> Any:
    """Return what a peer has packed: lists, texts, bytes and numbers.

    Raises:
        RemoteProtocolError: the frame is not msgpack of these.
    """
    try:
        return msgpack.unpackb(frame, max_ext_len=0, max_map_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise RemoteProtocolError("a peer has sent something that is not msgpack") from error
