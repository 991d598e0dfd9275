"""The positions of randomk, which are a part of the protocol."""

from __future__ import annotations

import numpy as np

from ps_server.codecs.base import SEGMENT_ELEMENTS, Key
from ps_server.codecs.randomk import drawn
from tests.support.codecs import KEY, decoded, encoded, numbers


def test_randomk_sends_what_both_draw() -> None:
    exact = numbers(1_000)
    got = decoded("randomk:0.1", encoded("randomk:0.1", exact), 1_000)
    positions = drawn((1, 1_000), 100, KEY)[0]
    assert np.flatnonzero(got).tolist() == positions.tolist()
    assert got[positions].tobytes() == exact[positions].tobytes()
    assert [p // 10 for p in positions.tolist()] == list(range(100))  # one of each equal part


def test_positions_never_change() -> None:
    """They are part of the protocol: these were computed by hand-written integers of Python."""
    mask = 2**64 - 1

    def mixed(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state = mixed((mixed(3) + 7) & mask)
    expected = [
        [
            100 * i + mixed((state + segment * SEGMENT_ELEMENTS + i) & mask) % 100
            for i in range(SEGMENT_ELEMENTS // 100)
        ]
        for segment in (2, 3)
    ]
    length = SEGMENT_ELEMENTS // 100 * 100
    assert drawn((2, length), SEGMENT_ELEMENTS // 100, Key(3, 2, 7)).tolist() == expected


def test_every_element_is_drawn_in_time() -> None:
    seen = np.zeros(1_000, bool)
    for clock in range(100):
        seen[drawn((1, 1_000), 100, Key(0, 0, clock))[0]] = True
    assert seen.all()
