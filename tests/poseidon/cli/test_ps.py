"""The table of `poseidon ps`; the command itself is tested with true jobs in test_kill.py."""

from __future__ import annotations

from poseidon.cli.ps import table


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([("JOB", "OUT"), ("a-long-one", "/x"), ("b", "")]) == "JOB         OUT\na-long-one  /x\nb"
