"""A queue of events in simulated time, and what takes time: serial resources and outgoing links.

Law: this module does not know what is sent or computed. Equal inputs give equal times to the bit.
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
    """Events in the order of their times; `now_s` is the time of the current event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when_s: float, action: Action) -> None:
        """Schedule an action at a time that is not past; at equal times in the order of the
        calls.
        """
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, action))

    def run(self) -> None:
        """Run all events."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class SerialResource:
    """A resource that does one piece of work after the other, in order of arrival: an incoming
    link, a processor.

    Attributes:
        work_s: total work so far.
    """

    def __init__(self) -> None:
        self.work_s = 0.0
        self._free_s = 0.0

    def take(self, now_s: float, work_s: float) -> float:
        """Queue a piece of work. Return the time at which it will be finished."""
        self.work_s += work_s
        self._free_s = max(self._free_s, now_s) + work_s
        return self._free_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message on a link.

    Attributes:
        queue: name of its queue; the queues of a link take turns, one for each sender and kind of
            receiver.
        urgency: priority within its queue; the lowest number goes first.
        out_s: how long it keeps the link busy.
        through: other resources that handle it at the same time, and for how long: incoming links,
            processors.
        delivered: called when the last of them has finished.
        least_s: shortest time from its begin to its delivery.
        gives_way_to: another queue of the same link, which must be empty and not blocked before
            this message may leave.
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
    """An outgoing link.

    A message passes through its resources while it leaves (it is cut into small packets), so it is
    delivered when the slowest has finished. If a resource falls behind, its queue waits once
    `buffer_s` of work is in flight, and the link serves the other queues.

    Args:
        events: the event queue.
        latency_s: from the last byte out to the last byte in.
        buffer_s: how far a resource may fall behind.
    """

    def __init__(
        self, events: EventQueue, *, latency_s: float = 0.0, buffer_s: float = 0.0
    ) -> None:
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
        behind = max(
            (resource.take(now_s, work_s) for resource, work_s in message.through), default=out
        )
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
