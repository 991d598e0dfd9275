"""Tables of text."""

from __future__ import annotations

from poseidon.base.text_columns import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("JOB", "N"), ("a-long-one", "12"), ("b", "")]
    assert aligned(rows) == ["JOB         N", "a-long-one  12", "b"]
    assert aligned(rows, left=1) == ["JOB          N", "a-long-one  12", "b"]
