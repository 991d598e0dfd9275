"""A peer that blocks is tried again as often as it takes messages: seldom on a slow link, at
once on a fast one.
"""

from __future__ import annotations

import pytest

from ps_server.transport.retries import LEAST_S, MOST_S, Retries


def attempts(link_s: float, seconds: float) -> tuple[int, int]:
    """Attempts and messages taken, where a link takes a message every `link_s`, starting with
    one waiting.
    """
    retries, now, free_s, tried, taken = Retries(), 0.0, 0.0, 0, 0
    while now < seconds:
        tried += 1
        if now >= free_s:
            retries.taken(b"a", now)
            free_s = max(now, free_s) + link_s
            taken += 1
        else:
            retries.add(b"a", now)
            now += max(retries.wait_s(now), 1e-6)
    return tried, taken


@pytest.mark.parametrize("link_s", [0.002, 0.01, 0.03, 0.2])
def test_a_few_attempts_a_message(link_s: float) -> None:
    tried, taken = attempts(link_s, 100 * link_s)
    # each attempt may come late by one pause, while others wait beyond this process
    assert taken >= 60
    assert tried / taken <= max(4, 2 + link_s / MOST_S)


def test_nobody_blocks_for_ever_and_a_peer_that_left_is_forgotten() -> None:
    retries = Retries()
    assert retries.wait_s(5.0) == float("inf")
    retries.add(b"a", 5.0)
    assert retries.is_early(b"a", 5.0)
    assert retries.wait_s(5.0) == pytest.approx(LEAST_S)
    assert not retries.is_early(b"a", 5.0 + LEAST_S)
    retries.try_all()
    assert not retries.is_early(b"a", 5.0)
    retries.forget(b"a")
    assert retries.peers == set()
    assert retries.wait_s(5.0) == float("inf")
