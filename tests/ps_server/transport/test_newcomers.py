"""Which connections end when strangers bring too many."""

from __future__ import annotations

import pytest

from ps_server.transport.newcomers import (
    LONGEST_BYTES,
    LONGEST_HANDSHAKE_BYTES,
    MOMENT_S,
    Newcomers,
    limit_of,
    sender_of,
)

LATER_S = 1.0


@pytest.mark.parametrize(
    ("files", "limit"), [(64, 4), (1024, 64), (20_000, 512), (2**20, 512), (1, 4)]
)
def test_the_limit_leaves_most_files_to_the_process(files: int, limit: int) -> None:
    assert limit_of(files) == limit


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::2:0:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::1", True),
        ("", "10.0.0.1", False),
    ],
)
def test_who_is_one_sender(one: str, other: str, same: bool) -> None:
    assert (sender_of(one) == sender_of(other)) is same


def full(limit: int = 4) -> Newcomers:
    newcomers = Newcomers(limit)
    for descriptor in range(limit):
        newcomers.came(descriptor, "10.0.0.9", 0.0)
    assert newcomers.too_many(LATER_S) == ()
    return newcomers


def test_the_oldest_of_who_has_most_ends() -> None:
    newcomers = full()
    newcomers.came(7, "10.0.0.1", 0.0)
    assert newcomers.too_many(LATER_S) == [0]
    newcomers.came(8, "10.0.0.2", 0.0)
    newcomers.came(9, "10.0.0.9", 0.0)
    assert newcomers.too_many(LATER_S) == [1, 2]
    assert newcomers.waiting == [3, 7, 8, 9]


def test_silent_ones_do_not_displace_who_has_got_further() -> None:
    newcomers = Newcomers(4)
    newcomers.came(1, "10.0.0.9", 0.0)
    newcomers.greeted(1)
    for descriptor in range(10, 30):
        newcomers.came(descriptor, "10.0.0.9", 0.0)
    assert newcomers.too_many(LATER_S) == list(range(10, 26))
    assert newcomers.waiting == [1, 26, 27, 28, 29]


def test_greeted_ones_do_not_keep_others_out() -> None:
    newcomers = full()
    for descriptor in range(4):
        newcomers.greeted(descriptor)
    newcomers.came(7, "10.0.0.9", 0.0)
    assert newcomers.too_many(LATER_S) == []
    newcomers.greeted(7)
    assert newcomers.too_many(LATER_S) == [0]


def test_who_is_known_is_not_counted_and_stays() -> None:
    newcomers = full()
    newcomers.spoke(0, b"worker")
    newcomers.known(b"worker")
    newcomers.known(b"nobody")
    for descriptor in range(10, 14):
        newcomers.came(descriptor, "10.0.0.9", 0.0)
    assert newcomers.too_many(LATER_S) == [1, 2, 3]
    assert newcomers.all_known() == [10, 11, 12, 13]
    assert newcomers.waiting == []


def test_a_descriptor_that_comes_again_is_another_connection() -> None:
    newcomers = Newcomers(4)
    newcomers.came(3, "10.0.0.9", 0.0)
    newcomers.spoke(3, b"stranger")
    newcomers.left(3)
    newcomers.came(3, "10.0.0.1", 0.0)
    newcomers.known(b"stranger")
    assert newcomers.waiting == [3]


def test_who_sends_more_than_a_handshake_before_it_is_over_ends() -> None:
    newcomers = full()
    newcomers.greeted(3)
    received = dict.fromkeys((1, 3), LONGEST_HANDSHAKE_BYTES + 1) | {0: LONGEST_HANDSHAKE_BYTES}
    assert newcomers.too_long(received) == []
    assert newcomers.too_long(received) == [1]
    assert newcomers.waiting == [0, 2, 3]


def test_who_sends_more_than_a_first_message_ends_at_the_second_look() -> None:
    newcomers = full()
    for descriptor in range(3):
        newcomers.greeted(descriptor)
    received = {0: LONGEST_BYTES, 1: LONGEST_BYTES + 1, 2: LONGEST_BYTES + 1}
    assert newcomers.too_long(received) == []
    newcomers.spoke(2, b"worker")
    newcomers.known(b"worker")
    assert newcomers.too_long(received) == [1]
    assert newcomers.waiting == [0, 3]


def test_the_port_closes_while_all_that_come_have_their_moment() -> None:
    newcomers = Newcomers(4)
    crowded = []
    for descriptor in range(9):
        newcomers.came(descriptor, "10.0.0.9", 0.01 * descriptor)
        assert not newcomers.too_many(0.01 * descriptor)
        crowded.append(newcomers.crowded)
    assert crowded == [False] * 7 + [True] * 2
    assert newcomers.too_many(MOMENT_S + 0.015) == [0, 1]
    assert newcomers.crowded
    newcomers.left(0)
    newcomers.left(1)
    assert not newcomers.crowded
