from __future__ import annotations

import threading

import numpy as np
import pytest

from ps_server.meters import NAP_S, ClientMeter, ServerMeter, StallMeter, payload_bytes
from ps_server.protocol.messages import Clock, Initial, Push, Value
from ps_server.protocol.settings import StoreSpec, TableSpec
from ps_server.statistics import TableStatistics

STORE = StoreSpec(
    workers=1,
    shards=1,
    start_clock=5,
    tables=(TableSpec(name="a", size=4), TableSpec(name="b", size=4)),
)
ARRAY = np.zeros(4, dtype=np.float32)


class Clockwork:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def push(table: int) -> Push:
    return Push(table, 0, 5, 0.1, ARRAY)


def value(table: int) -> Value:
    return Value(table, 0, 6, 6, ARRAY)


def test_bytes_go_to_their_table_and_the_rest_beside() -> None:
    meter = ClientMeter(STORE, Clockwork())
    meter.sent(push(1), [b"head", memoryview(ARRAY)])
    meter.received(value(0), [b"h", memoryview(ARRAY)])  # a first value
    meter.pushed(0)
    meter.received(value(0), [b"hea", memoryview(ARRAY)])
    meter.sent(Initial(1, 0, [ARRAY]), [memoryview(ARRAY)])
    meter.sent(Clock(6), [b"123"])
    meter.sent(Push(7, 0, 5, 0.1, ARRAY), [b"12"])  # no such table
    found = meter.statistics(9)
    assert found.iterations == 4
    assert [(t.name, t.bytes_out, t.bytes_in) for t in found.tables] == [("a", 0, 19), ("b", 20, 0)]
    assert (found.other_bytes_out, found.other_bytes_in) == (21, 17)


def test_what_was_not_waited_for_was_hidden() -> None:
    clock = Clockwork()
    meter = ClientMeter(STORE, clock)
    meter.received(value(0), [])  # the first value follows from no push
    for way_s, waited_s in ((3.0, 1.0), (2.0, 0.0), (4.0, 4.0)):
        meter.pushed(0)
        clock.s += way_s - waited_s
        began_s = meter.now()
        clock.s += waited_s
        meter.received(value(0), [])
        meter.waited(0, began_s)
        clock.s += 10  # training goes on with the value in hand
    (table, other) = meter.statistics(8).tables
    assert table.waited_s == pytest.approx(5)
    assert table.hidden_s == pytest.approx(4)
    assert other == TableStatistics(name="b")


def test_the_last_piece_of_a_value_ends_the_way() -> None:
    clock = Clockwork()
    meter = ClientMeter(STORE, clock)
    meter.pushed(0)
    for _ in range(3):
        clock.s += 1
        meter.received(value(0), [])
    assert meter.statistics(6).tables[0].hidden_s == pytest.approx(3)


def test_what_is_still_on_its_way_is_not_counted_yet() -> None:
    clock = Clockwork()
    meter = ClientMeter(STORE, clock)
    meter.received(value(0), [])
    clock.s += 1
    meter.pushed(0)
    clock.s += 7
    assert meter.statistics(6).tables[0].hidden_s == 0


def test_no_way_counts_twice_while_the_next_begins() -> None:
    found: list[float] = []

    def now() -> float:
        if clock.s == 105:  # the second push reads the time
            found.append(meter.statistics(6).tables[0].hidden_s)
        return clock.s

    clock = Clockwork()
    meter = ClientMeter(STORE, now)
    meter.pushed(0)
    clock.s += 3
    meter.received(value(0), [])
    clock.s += 2
    meter.pushed(0)
    assert found == [3.0]


def test_a_shards_queue_and_time() -> None:
    clock = Clockwork()
    meter = ServerMeter(clock)
    for queue in (3, 1):
        meter.begin(queue)
        clock.s += 2
        for _ in range(queue):
            meter.received([b"12345"])
            meter.handled()
        meter.sent([b"12", memoryview(ARRAY)])
        meter.end()
        clock.s += 50  # waiting for messages
    found = meter.statistics(updates=9, memory_bytes=64, refused=3, dropped=2)
    assert (found.messages_in, found.bytes_in) == (4, 20)
    assert (found.messages_out, found.bytes_out) == (2, 36)
    assert (found.queue, found.longest_queue) == (0, 3)
    assert (found.refused, found.dropped) == (3, 2)
    assert found.busy_s == pytest.approx(4)
    assert (found.updates, found.memory_bytes) == (9, 64)
    assert found.peak_bytes > 2**20


def test_the_queue_of_this_moment() -> None:
    meter = ServerMeter()
    meter.begin(5)
    for _ in range(7):
        meter.received([])  # the messages of one packet
    meter.handled()
    assert meter.statistics(updates=0, memory_bytes=0, refused=0, dropped=0).queue == 4


class Nap(threading.Event):
    """A sleep that takes some time."""

    def __init__(self, clock: Clockwork, *lasts_s: float) -> None:
        super().__init__()
        self.clock, self.lasts_s = clock, list(lasts_s)

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.s += self.lasts_s.pop(0)
        return self.is_set()


def test_a_process_that_does_not_run_is_stalled() -> None:
    clock = Clockwork()
    meter = StallMeter(clock)
    over = Nap(clock, NAP_S, NAP_S + 0.5, NAP_S, NAP_S + 2.0)
    for _ in range(4):
        assert not meter.sleep(over)
    assert meter.stalled_s == pytest.approx(2.5)


def test_a_sleep_that_was_ended_is_no_stall() -> None:
    clock = Clockwork()
    meter, over = StallMeter(clock), Nap(clock, 9.0)
    over.set()
    assert meter.sleep(over)
    assert meter.stalled_s == 0


def test_bytes_of_frames_of_any_kind() -> None:
    assert payload_bytes([b"123", bytearray(4), memoryview(ARRAY)]) == 23
    assert payload_bytes([]) == 0
