"""Some thousand hostile messages for each target; `python -m tests.fuzz.sessions` sends a
million.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz.sessions import TARGETS

MESSAGES = 2_000
SEED = 20
LEAST_KEPT_BYTES = 8
"""Smallest memory of a message that is kept: its entry in a list."""


@pytest.mark.parametrize("name", TARGETS)
def test_refused_messages_change_nothing(name: str) -> None:
    report = TARGETS[name](MESSAGES, Random(f"{SEED} {name}"))
    assert report.messages >= MESSAGES
    assert report.refused > MESSAGES / 4, "too many of these messages are legal"
    assert report.growth_bytes < MESSAGES / 2 * LEAST_KEPT_BYTES, "messages are kept"
