"""Time as a list of events, and the two kinds of things that take time: resources and links.

Law: nothing here knows what is sent or computed; equal inputs give equal times to the bit.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

Action = Callable[[], None]
Urgency = tuple[int, ...]


class EventQueue:
    """What happens when; `now_s` is the time of the event at hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when_s: float, action: Action) -> None:
        """Do something at a time that is not past; at equal times in the order of the calls."""
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, action))

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class SerialResource:
    """Does one piece of work after the other, in the order they come: a link inwards, a processor.

    Attributes:
        work_s: all that it was given so far.
    """

    def __init__(self) -> None:
        self.work_s = 0.0
        self._free_s = 0.0

    def take(self, now_s: float, work_s: float) -> float:
        """Queue a piece of work; returns when it will be done."""
        self.work_s += work_s
        self._free_s = max(self._free_s, now_s) + work_s
        return self._free_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Something to send.

    Attributes:
        queue: the link's queues take turns: one for each sender and kind of receiver.
        urgency: of one queue's messages the lowest goes first.
        out_s: how long it keeps the link busy.
        through: what else works on it at the same time, and for how long: links inwards, processors.
        delivered: called when the last of them is done.
        least_s: not before so long after its beginning.
        gives_way_to: another queue of the same link, which must be empty, and behind with nothing, before this may leave.
    """

    queue: str
    urgency: Urgency
    out_s: float
    through: tuple[tuple[SerialResource, float], ...]
    delivered: Action
    least_s: float = 0.0
    gives_way_to: str = ""


@dataclass(slots=True)
class _Queue:
    waiting: list[tuple[Urgency, int, Message]] = field(default_factory=list)
    blocked: bool = False


class OutgoingLink:
    """A link outwards.

    A message flows through its resources while it leaves (it is cut into small packets on its way), so it is delivered when
    the slowest is done. Where a resource falls behind, its queue waits once `buffer_s` of work is on its way, and the link
    serves the other queues.

    Args:
        events: the time.
        latency_s: from the last byte out to the last byte in.
        buffer_s: how far a resource may fall behind.
    """

    def __init__(self, events: EventQueue, *, latency_s: float = 0.0, buffer_s: float = 0.0) -> None:
        self._event_queue = events
        self._latency_s = latency_s
        self._buffer_s = buffer_s
        self._queues: dict[str, _Queue] = {}
        self._turns: deque[_Queue] = deque()
        self._count = 0
        self._busy = False

    def send(self, message: Message) -> None:
        """Queue a message."""
        if message.queue not in self._queues:
            self._queues[message.queue] = _Queue()
            self._turns.append(self._queues[message.queue])
        self._count += 1
        heapq.heappush(self._queues[message.queue].waiting, (message.urgency, self._count, message))
        self._begin()

    def _begin(self) -> None:
        queue = None if self._busy else self._next()
        if queue is None:
            return
        message = heapq.heappop(queue.waiting)[2]
        now_s = self._event_queue.now_s
        self._busy = queue.blocked = True
        out = now_s + message.out_s
        behind = max((resource.take(now_s, work_s) for resource, work_s in message.through), default=out)
        self._event_queue.at(out, self._free_link)
        self._event_queue.at(max(out, behind - self._buffer_s), partial(self._free_queue, queue))
        there = max(out, behind, now_s + message.least_s) + self._latency_s
        self._event_queue.at(there, message.delivered)

    def _free_link(self) -> None:
        self._busy = False
        self._begin()

    def _free_queue(self, queue: _Queue) -> None:
        queue.blocked = False
        self._begin()

    def _next(self) -> _Queue | None:
        for _ in range(len(self._turns)):
            queue = self._turns[0]
            self._turns.rotate(-1)
            if queue.waiting and not queue.blocked and not self._gives_way(queue.waiting[0][2]):
                return queue
        return None

    def _gives_way(self, message: Message) -> bool:
        first = self._queues.get(message.gives_way_to)
        return first is not None and (first.blocked or bool(first.waiting))
