"""Counters of the message path, for `Client.statistics` and `Server.statistics`.

Laws:
* A meter costs a few additions a message and decides nothing.
* Each number has one writer: a client's bytes the thread that owns its sockets, its times the
  thread that trains.
* A table is on its way from its push until the last value of it that came before the next push. At
  staleness 0 that is the value which follows from the push.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ps_server.protocol.messages import GetRows, Push, PushRows, Rows, Value
from ps_server.protocol.settings import StoreSpec
from ps_server.statistics import ClientStatistics, ShardStatistics, TableStatistics

NAP_S = 0.025


class ClientMeter:
    """The counters of one client.

    Args:
        store: names the tables.
        now: seconds, monotonic.
    """

    def __init__(self, store: StoreSpec, now: Callable[[], float] = time.perf_counter) -> None:
        self._names = [table.name for table in store.tables]
        self._start_clock = store.start_clock
        count = len(self._names)
        self.now = now
        """Returns the time, for `waited` later."""
        self._out = [0] * (count + 1)  # the last place: messages of no table's iterations
        self._in = [0] * (count + 1)
        self._rows: dict[int, list[int]] = {}  # of each row table bytes out and in
        self._waited_s = [0.0] * count
        # how long its pushes before the last were on their way, and when that left: changed as one,
        # because `statistics` may come between
        self._pushed: list[tuple[float, float | None]] = [(0.0, None)] * count
        self._came_s = [0.0] * count

    def sent(self, message: object, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        """Count a message that is handed to the network."""
        if isinstance(message, PushRows | GetRows):
            self._of_rows(message.row_table)[0] += payload_bytes(frames)
            return
        self._out[self._place(message)] += payload_bytes(frames)

    def received(self, message: object, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        """Count a message that has come."""
        if isinstance(message, Rows):
            self._of_rows(message.row_table)[1] += payload_bytes(frames)
            return
        place = self._place(message)
        if place >= 0 and self._pushed[place][1] is None:
            place = -1  # a first value follows from no push
        self._in[place] += payload_bytes(frames)
        if place >= 0:
            self._came_s[place] = self.now()

    def pushed(self, table: int) -> None:
        """Note that a table is pushed."""
        self._pushed[table] = self._so_far(table), self.now()

    def waited(self, table: int, began_s: float) -> None:
        """Count the time that a read of a table has blocked, since `began_s` by this meter's
        clock.
        """
        self._waited_s[table] += self.now() - began_s

    def statistics(self, clock: int, row_tables: Sequence[str] = ()) -> ClientStatistics:
        """Return all counters.

        Args:
            clock: the client's present clock.
            row_tables: their names.
        """
        of_rows = [self._rows.get(number, (0, 0)) for number in range(len(row_tables))]
        tables = tuple(
            TableStatistics(
                name=name,
                bytes_out=self._out[table],
                bytes_in=self._in[table],
                waited_s=self._waited_s[table],
                hidden_s=max(0.0, self._so_far(table) - self._waited_s[table]),
            )
            for table, name in enumerate(self._names)
        )
        return ClientStatistics(
            iterations=clock - self._start_clock,
            tables=tables,
            other_bytes_out=self._out[-1],
            other_bytes_in=self._in[-1],
            row_tables=tuple(
                TableStatistics(name=name, bytes_out=bytes_out, bytes_in=bytes_in)
                for name, (bytes_out, bytes_in) in zip(row_tables, of_rows, strict=True)
            ),
        )

    def _of_rows(self, number: int) -> list[int]:
        return self._rows.setdefault(number, [0, 0])

    def _so_far(self, table: int) -> float:
        before_s, left_s = self._pushed[table]
        under_way_s = 0.0 if left_s is None else max(0.0, self._came_s[table] - left_s)
        return before_s + under_way_s

    def _place(self, message: object) -> int:
        if isinstance(message, Push | Value) and message.table < len(self._names):
            return message.table
        return -1


class ServerMeter:
    """The counters of one shard.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._counted = ShardStatistics()
        self._since_s: float | None = None

    def begin(self, queue: int) -> None:
        """Note that so many packets have come, of one message or more each, and are handled now."""
        self._since_s = self._now()
        self._counted.queue = queue
        self._counted.longest_queue = max(self._counted.longest_queue, queue)

    def received(self, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        """Count a message."""
        self._counted.messages_in += 1
        self._counted.bytes_in += payload_bytes(frames)

    def handled(self) -> None:
        """Note that one of the packets is handled."""
        self._counted.queue -= 1

    def sent(self, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        """Count a message that is handed to the network."""
        self._counted.messages_out += 1
        self._counted.bytes_out += payload_bytes(frames)

    def end(self) -> None:
        """Note that all of them are handled."""
        if self._since_s is not None:
            self._counted.busy_s += self._now() - self._since_s
            self._since_s = None

    def statistics(self, **own: int) -> ShardStatistics:
        """Return all counters, including the shard's own, which are given."""
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # as Linux counts
        return replace(self._counted, **own, peak_bytes=1024 * kib)


class StallMeter:
    """The time for which this process did not run although it should: it was stopped, or had no
    processor.

    A thread sleeps for a short time again and again; what a sleep takes beyond that counts.

    Args:
        now: seconds, monotonic.

    Attributes:
        stalled_s: in total.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.stalled_s = 0.0

    def sleep(self, over: threading.Event) -> bool:
        """Sleep once; return whether the event has ended the sleep."""
        began_s = self._now()
        if over.wait(NAP_S):
            return True
        self.stalled_s += max(0.0, self._now() - began_s - NAP_S)
        return False


def payload_bytes(frames: Sequence[bytes | bytearray | memoryview]) -> int:
    """Return the bytes of a message's frames."""
    return sum([frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames])
