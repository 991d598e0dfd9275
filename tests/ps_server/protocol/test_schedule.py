"""What overtakes what, that nothing is lost, and how packets are made."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ps_server.protocol import messages as m
from ps_server.protocol.frames import MAX_FRAMES, encode
from ps_server.protocol.schedule import ORDERS, PACKET_BYTES, LinkPriority, Schedule
from ps_server.protocol.settings import MAX_WORKERS

KIB = 1024


def array(size_bytes: int = 4) -> m.Array:
    return np.zeros(size_bytes // 4, dtype=np.float32)


def push(table: int, chunk: int = 0, clock: int = 0) -> m.Push:
    return m.Push(table, chunk, clock, 0.1, array())


def value(table: int, chunk: int = 0, clock: int = 1) -> m.Value:
    return m.Value(table, chunk, clock, clock, array())


def drain(schedule: Schedule, most_bytes: int = 0) -> list[m.Message]:
    out: list[m.Message] = []
    while packet := schedule.take(most_bytes):
        out.extend(waiting.message for waiting in packet)
    return out


HELLO, GATHER, GET = m.Hello(0, b""), m.Gather(0, b"x"), m.Get(0, 0, 1)
SIGNAL, CLOCK, LEAVE, FRESH = m.Signal(m.SignalKind.STOP, 9), m.Clock(1), m.Leave(), m.Fresh(1)
P = [push(table) for table in range(4)]
P0_NEXT = push(0, clock=1)
V = [value(table) for table in range(4)]
H = [m.History(table, 0, 1, 0, array()) for table in range(2)]

ORDER: dict[str, tuple[Sequence[m.Message], Sequence[m.Message]]] = {
    "urgent pushes overtake": ([P[3], P[2], P[0], P[1]], [P[0], P[1], P[2], P[3]]),
    "lower chunks overtake": ([push(1, 2), push(1, 0)], [push(1, 0), push(1, 2)]),
    "values likewise": ([V[2], V[3], V[0]], [V[0], V[2], V[3]]),
    "small messages overtake all": ([P[1], GATHER, SIGNAL], [GATHER, SIGNAL, P[1]]),
    "small messages keep their order": ([HELLO, GATHER, GET], [HELLO, GATHER, GET]),
    "a clock follows its pushes": ([P[3], P[0], CLOCK], [P[0], P[3], CLOCK]),
    "no push overtakes a clock": ([P[3], CLOCK, P0_NEXT], [P[3], CLOCK, P0_NEXT]),
    "small messages overtake a clock": ([P[3], CLOCK, GATHER], [GATHER, P[3], CLOCK]),
    "leaving is last": ([P[1], GATHER, LEAVE], [GATHER, P[1], LEAVE]),
    "no value waits for Fresh to be true": ([V[3], FRESH, V[0]], [V[3], FRESH, V[0]]),
    "the same table keeps its order": ([P[0], P0_NEXT], [P[0], P0_NEXT]),
    "everything overtakes a history": (
        [H[1], V[3], FRESH, H[0], V[0], LEAVE],
        [V[3], FRESH, V[0], LEAVE, H[1], H[0]],
    ),
}


@pytest.mark.parametrize(("given", "expected"), ORDER.values(), ids=ORDER.keys())
def test_order(given: Sequence[m.Message], expected: Sequence[m.Message]) -> None:
    schedule = Schedule()
    for message in given:
        schedule.add(message)
    assert [str(message) for message in drain(schedule)] == [str(message) for message in expected]


def test_a_message_without_an_order_of_its_own_overtakes_what_waits() -> None:
    assert set(ORDERS) < set(m.Message.__args__)
    schedule = Schedule()
    for message in (push(1), m.Clock(1), m.Gather(0, b"")):
        schedule.add(message)
    assert drain(schedule) == [m.Gather(0, b""), push(1), m.Clock(1)]


def test_a_newer_value_takes_the_place_of_an_older_one() -> None:
    schedule = Schedule()
    older, newer, other = value(1, clock=1), value(1, clock=2), value(0)
    for message in (older, FRESH, other, newer):
        schedule.add(message)
    assert drain(schedule) == [newer, FRESH, other]
    schedule.add(older)  # nothing waits any more: it is kept
    assert drain(schedule) == [older]


def test_small_messages_share_a_packet_and_large_ones_travel_alone() -> None:
    schedule = Schedule()
    sizes = [3 * KIB, 4 * KIB, 2 * KIB, 100 * KIB, 1 * KIB]
    for table, size in enumerate(sizes):
        schedule.add(m.Push(table, 0, 0, 0.1, array(size)))
    packets = []
    while packet := schedule.take(8 * KIB):
        packets.append([sum(m.frame_bytes(waiting.message)) for waiting in packet])
    assert packets == [[3 * KIB, 4 * KIB], [2 * KIB], [100 * KIB], [1 * KIB]]


@pytest.mark.parametrize(
    "message", [P[0], GET, m.Gathered(0, (b"",) * MAX_WORKERS)], ids=lambda x: type(x).__name__
)
def test_a_packet_has_no_more_frames_than_a_receiver_takes(message: m.Message) -> None:
    schedule = Schedule()
    for _ in range(MAX_FRAMES + 1):
        schedule.add(message)
    packet = schedule.take(PACKET_BYTES)
    assert len(encode(*(waiting.message for waiting in packet))) <= MAX_FRAMES


def test_a_packet_has_one_message_of_the_background_and_no_other() -> None:
    schedule = Schedule()
    for message in (V[0], H[0], H[1]):
        schedule.add(message)
    assert not schedule.is_in_background
    assert [waiting.message for waiting in schedule.take(8 * KIB)] == [V[0]]
    assert schedule.is_in_background
    assert [waiting.message for waiting in schedule.take(8 * KIB)] == [H[0]]
    assert drain(schedule) == [H[1]]
    assert schedule.is_in_background


def test_pushes_can_be_left_where_they_are_with_what_may_not_overtake_them() -> None:
    schedule = Schedule()
    for message in (P[1], CLOCK, GATHER, P0_NEXT):
        schedule.add(message)
    assert [waiting.message for waiting in schedule.take(KIB, pushes=False)] == [GATHER]
    assert not schedule.take(KIB, pushes=False)
    assert drain(schedule) == [P[1], CLOCK, P0_NEXT]


def test_what_was_put_back_waits_where_it_was_and_may_be_overtaken() -> None:
    schedule = Schedule()
    for message in (P[2], P[3], CLOCK):
        schedule.add(message)
    packet = schedule.take(4)
    assert [waiting.message for waiting in packet] == [P[2]]
    schedule.put_back(packet)
    schedule.add(P[1])
    assert drain(schedule) == [P[2], P[3], CLOCK, P[1]]
    schedule.add(P[2])
    packet = schedule.take(4)
    schedule.put_back(packet)
    schedule.add(P[1])
    assert drain(schedule) == [P[1], P[2]]


def test_nothing_is_lost_whatever_is_put_back() -> None:
    random_ = random.Random(1)
    schedule = Schedule()
    expected, got, longest = [], [], 0
    for number in range(2_000):
        message = random_.choice([push(random_.randrange(9), clock=number), m.Clock(number)])
        schedule.add(message)
        expected.append(str(message))
        longest = max(longest, len(schedule))
        packet = schedule.take(random_.randrange(20))
        if random_.random() < 0.6:
            schedule.put_back(packet)
        else:
            got += [str(waiting.message) for waiting in packet]
    got += [str(message) for message in drain(schedule)]
    assert sorted(got) == sorted(expected)
    assert longest > 1
    clocks = [text for text in got if text.startswith("Clock")]
    assert clocks == [text for text in expected if text.startswith("Clock")]


def test_a_hello_travels_alone() -> None:
    """A shard knows its sender before it gets the first values, however long these take."""
    queue = Schedule()
    given = [m.Hello(0, "token"), m.Clock(1), m.Clock(2)]
    for message in given:
        queue.add(message)
    packets = [[waiting.message for waiting in queue.take(1 << 20)] for _ in range(2)]
    assert packets == [given[:1], given[1:]]


def test_a_link_is_free_until_it_is_taken_and_the_second_sender_is_woken_once() -> None:
    link, woken = LinkPriority(), list[bool]()
    link.when_free(lambda: woken.append(link.is_free))
    assert link.is_free
    link.free()
    assert woken == []  # it has waited for nothing
    link.take()
    link.take()
    assert not link.is_free
    link.free()
    link.free()
    assert woken == [True]


def test_nobody_need_wait() -> None:
    link = LinkPriority()
    link.take()
    link.free()
    assert link.is_free
