"""Silence counts while this process was running."""

from __future__ import annotations

import pytest

from poseidon.cluster.agent.silence import Silence

LIMIT_S = 10.0


def _looks_until_lost(wait_s: float, beat_s: float = float("inf"), most: int = 1000) -> int | None:
    """Return after how many looks a process counts as lost; None: it never does.

    Args:
        wait_s: between two looks, which should be 1.
        beat_s: between two messages of the other process; infinite: it is dead.
        most: looks.
    """
    silence = Silence(1.0, 0.0)
    next_s = beat_s
    for number in range(1, most):
        now_s = number * wait_s
        if next_s <= now_s:  # this process has been given a processor, and takes what has come
            silence.heard_s = now_s
            next_s = now_s + beat_s
        if silence.look(now_s) > LIMIT_S:
            return number
    return None


@pytest.mark.parametrize(("wait_s", "looks"), [(0.25, 41), (1.0, 11), (3.0, 11), (60.0, 11)])
def test_a_death_is_found_after_as_many_waits_however_late_they_are(
    wait_s: float, looks: int
) -> None:
    assert _looks_until_lost(wait_s) == looks


@pytest.mark.parametrize("wait_s", [0.1, 1.0, 4.0, 15.0, 3600.0])
def test_one_that_sends_is_never_lost(wait_s: float) -> None:
    """At 15 s a wait all its messages come later than the limit."""
    assert _looks_until_lost(wait_s, beat_s=2.0) is None


def test_a_silence_begins_with_the_last_message() -> None:
    silence = Silence(1.0, 0.0)
    assert [silence.look(1.0), silence.look(1.5), silence.look(9.0)] == [1.0, 1.5, 2.5]
    silence.heard_s = 9.25
    assert [silence.look(9.5), silence.look(10.5)] == [0.25, 1.25]


def test_a_message_that_came_after_the_clock_was_read() -> None:
    silence = Silence(1.0, 0.0)
    silence.heard_s = 5.1
    assert silence.look(5.0) == 0.0
