"""Results as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.testbed.tables import Table, megabytes, percent, rate_text, write_json

TABLE = Table(
    title="Speed",
    head=("job", "s"),
    rows=(("hybrid", "1.5"), ("DDP", "12.25")),
    reading="Less is better.",
    facts=({"job": "hybrid", "seconds": [1.5]},),
)


def test_columns_are_aligned() -> None:
    assert str(TABLE).splitlines() == [
        "Speed",
        "",
        "job         s",
        "hybrid    1.5",
        "DDP     12.25",
        "",
        "Less is better.",
    ]


def test_programs_get_the_numbers(tmp_path: Path) -> None:
    write_json([TABLE], tmp_path / "facts.json")
    (table,) = json.loads((tmp_path / "facts.json").read_text())
    assert table["facts"] == [{"job": "hybrid", "seconds": [1.5]}]
    assert table["title"] == "Speed"


def test_words_for_numbers() -> None:
    assert megabytes(24_409_999) == "24.41"
    assert percent(-0.004) == "-0.4%"
    assert rate_text(None) == "unshaped"
    assert rate_text(250.0) == "250 Mbit/s"
