"""The queue of messages for one peer. A pure priority queue: messages in, packets of messages out.

Laws:

* Arrays that the next forward pass needs first leave first: of the queued arrays the one with the
  lowest table id, then the lowest chunk. A table's id is its place in the forward order. An array
  that is added late overtakes others.
* `Order` says what may overtake what; two messages of the same urgency keep their order.
* A queued value is replaced by a newer one of the same chunk: the receiver has no use for the
  older.
* A message of the background is a packet of its own, and leaves when nothing else is queued.
* Nothing is lost: every message but a replaced one is taken exactly once, unless it was put back.

A packet is one or more messages that travel together: small ones share the cost of a message on the
wire, and no packet of more than one message is larger than the caller allows. Each frame counts
`FRAME_BYTES` more than it has, so that a packet of empty messages has few enough frames, too.

Last, which of two senders of a host uses its network link first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import Enum

from ps_server.protocol import messages as m
from ps_server.protocol.fields import Buffer
from ps_server.protocol.frames import encode


class Order(Enum):
    """What a message may overtake."""

    AT_ONCE = "at once"
    """Everything but others of its kind: small, and a receiver waits for it."""
    BY_URGENCY = "by urgency"
    """Arrays that are less urgent, but nothing that leaves in turn."""
    IN_TURN = "in turn"
    """Nothing; and nothing overtakes it: it is about the messages sent before it."""
    IN_BACKGROUND = "in the background"
    """Nothing; and everything overtakes it: no iteration waits for it."""


ORDERS: dict[type, Order] = {
    m.Push: Order.BY_URGENCY,
    m.Value: Order.BY_URGENCY,
    m.History: Order.IN_BACKGROUND,
    m.Clock: Order.IN_TURN,  # all pushes of these iterations are sent
    m.Part: Order.IN_TURN,  # all pushes of the part are sent
    m.Fresh: Order.IN_TURN,  # valid for every chunk that was not sent again
    m.Leave: Order.IN_TURN,
}
"""All others leave at once.

`Signal` must do so: it leaves before the pushes, and so before the values, of a later clock.
"""

PACKET_BYTES = 256 * 1024
"""Small against a chunk, so that packets delay nothing; large against what a message costs by
itself.
"""
PACKET_IN_MEMORY_BYTES = 2 * 1024 * 1024
"""The same where large arrays pass in shared memory (`shared_memory.py`)."""
FRAME_BYTES = 256
"""So the largest packet has as many frames as `decode` takes at most."""
_FIRST_EPOCH = 0
_AT_ONCE_EPOCH = -1
_LAST = 2**62
_BACKGROUND_EPOCH = 2**62

Key = tuple[int, int, int, int]


class Waiting:
    """A queued message with its place: (epoch, table, chunk, number).

    In-turn messages end an epoch.

    Attributes:
        frames: the encoded message; empty until one of its senders has encoded it.
    """

    __slots__ = ("frames", "key", "message")

    def __init__(self, key: Key, message: m.Message, frames: list[Buffer]) -> None:
        self.key = key
        self.message = message
        self.frames = frames

    def on_the_wire(self) -> list[Buffer]:
        """Return the message's frames, made once for all that share them."""
        if not self.frames:
            self.frames.extend(encode(self.message))
        return self.frames

    def __lt__(self, other: Waiting) -> bool:
        return self.key < other.key


class Schedule:
    """The queued messages for one peer."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._values: dict[tuple[int, int], Waiting] = {}
        self._epoch = _FIRST_EPOCH
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, message: m.Message, frames: list[Buffer] | None = None) -> None:
        """Add a message.

        Args:
            message: the message.
            frames: of a message for several peers, the same list for all, empty until it is sent to
                the first of them.
        """
        frames = [] if frames is None else frames
        if isinstance(message, m.Value):
            older = self._values.get((message.table, message.chunk))
            if older is not None:
                older.message = message
                older.frames = frames
                return
        waiting = Waiting(self._place(message), message, frames)
        self._number += 1
        if isinstance(message, m.Value):
            self._values[message.table, message.chunk] = waiting
        heapq.heappush(self._heap, waiting)

    @property
    def is_in_background(self) -> bool:
        """Whether nothing is queued but messages of the background."""
        return not self._heap or self._heap[0].key[0] == _BACKGROUND_EPOCH

    def take(self, most_bytes: int, *, pushes: bool = True) -> list[Waiting]:
        """Take the next packet, empty when nothing is queued. A caller that cannot send it calls
        `put_back`. A `Hello` is a packet of its own: a shard gets a packet when all of it has come,
        and ends connections that have sent much and are not known.

        Args:
            most_bytes: of a packet of more than one message, with `FRAME_BYTES` for each frame.
            pushes: False: pushes wait, and messages that may not overtake them.
        """
        packet: list[Waiting] = []
        left = most_bytes
        while self._heap and (pushes or not isinstance(self._heap[0].message, m.Push)):
            frames = m.frame_bytes(self._heap[0].message)
            left -= sum(frames) + FRAME_BYTES * (1 + len(frames))
            if packet and (left < 0 or self.is_in_background):
                break
            waiting = heapq.heappop(self._heap)
            if isinstance(waiting.message, m.Value):
                del self._values[waiting.message.table, waiting.message.chunk]
            packet.append(waiting)
            if waiting.key[0] == _BACKGROUND_EPOCH or isinstance(waiting.message, m.Hello):
                break
        return packet

    def put_back(self, packet: Sequence[Waiting]) -> None:
        """Queue the messages of a packet again, where they were: it could not be sent."""
        for waiting in packet:
            if isinstance(waiting.message, m.Value):
                self._values[waiting.message.table, waiting.message.chunk] = waiting
            heapq.heappush(self._heap, waiting)

    def _place(self, message: m.Message) -> Key:
        order = ORDERS.get(type(message), Order.AT_ONCE)
        if order is Order.IN_BACKGROUND:
            return (_BACKGROUND_EPOCH, 0, 0, self._number)
        if order is Order.AT_ONCE:
            return (_AT_ONCE_EPOCH, 0, 0, self._number)
        if order is Order.BY_URGENCY:
            assert isinstance(message, m.Push | m.Value)
            return (self._epoch, message.table, message.chunk, self._number)
        self._epoch += 1
        return (self._epoch - 1, _LAST, 0, self._number)


class LinkPriority:
    """Two senders share a link: the first takes it while it has something to send, the second
    waits until it is free.

    Law: the first sender makes its calls under one lock, and `waiting` may be called under that
    lock. The second sender reads `is_free` from any thread; a stale answer delays it or lets it
    send early, and loses nothing.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: Callable[[], None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether the first sender has nothing left to send."""
        return not self._taken

    def take(self) -> None:
        """First sender: note that it has something to send."""
        self._taken = True

    def free(self) -> None:
        """First sender: note that all has left the host; wake the second sender if it may have
        waited.
        """
        if self._taken:
            self._taken = False
            self._waiting()

    def when_free(self, waiting: Callable[[], None]) -> None:
        """Second sender: set what `free` calls, on the first sender's thread. It must not block."""
        self._waiting = waiting
