"""How busy links are, from counters."""

from __future__ import annotations

import pytest

from benchmarks.testbed.hosts import Traffic
from benchmarks.testbed.timeline import busy_between


def test_bytes_become_parts_of_the_rate() -> None:
    old = [Traffic(sent_bytes=0, received_bytes=100), Traffic(sent_bytes=50, received_bytes=0)]
    new = [
        Traffic(sent_bytes=125_000, received_bytes=100),
        Traffic(sent_bytes=62_550, received_bytes=31_250),
    ]
    end_s, sent, received = busy_between(
        old, new, began_s=10.0, ended_s=10.5, zero_s=9.0, rate_mbit=2.0
    )
    assert end_s == pytest.approx(1.5)
    assert sent == pytest.approx([1.0, 0.5])
    assert received == pytest.approx([0.0, 0.25])
