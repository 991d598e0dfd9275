"""A few thousand hostile messages at each end; `python -m tests.fuzz.sessions` throws a million."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz.sessions import TARGETS

MESSAGES = 3_000
SEED = 20
LEAST_KEPT_BYTES = 8
"""Of a message of which anything is kept: its place in a list."""


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_is_refused_changes_anything(name: str) -> None:
    report = TARGETS[name](MESSAGES, Random(f"{SEED} {name}"))
    assert report.messages >= MESSAGES
    assert report.refused > MESSAGES / 4, "too many of these messages are legal"
    assert report.growth_bytes < MESSAGES / 2 * LEAST_KEPT_BYTES, "something is kept of messages"
