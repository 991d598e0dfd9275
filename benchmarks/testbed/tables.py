"""Results as text for people, and as JSON for programs. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of results.

    Attributes:
        title: one line.
        head: the columns.
        rows: as many cells each.
        reading: sentences on how to read it.
        facts: the same in numbers, for programs.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reading: str
    facts: tuple[dict[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        lines = [
            self.title,
            "",
            *aligned([self.head, *self.rows]),
            "",
            *textwrap.wrap(self.reading, WIDTH),
        ]
        return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines: the first column aligned left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in rows
    ]


def megabytes(count: float) -> str:
    """Return millions of bytes, as `24.41`."""
    return f"{count / 1e6:.2f}"


def percent(part: float) -> str:
    """Return a deviation, as `+0.4%`."""
    return f"{part:+.1%}"


def rate_text(rate_mbit: float | None) -> str:
    """Return a rate, as `250 Mbit/s`."""
    return "unshaped" if rate_mbit is None else f"{rate_mbit:g} Mbit/s"


def write_json(tables: Sequence[Table], path: Path) -> None:
    """Write all results as JSON."""
    plain = [
        {key: value for key, value in asdict(table).items() if key != "rows"} for table in tables
    ]
    path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
