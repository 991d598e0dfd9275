"""Tables of text, as commands and logs show them."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.base.output_lines import visible_line


def aligned(rows: Sequence[Sequence[str]], *, left: int | None = None) -> list[str]:
    """Return rows as lines, each column as wide as its widest cell, separated by two blanks.

    Args:
        rows: one or more, of equally many cells.
        left: the first so many columns are aligned to the left, the others to the right; None: all
            to the left.
    """
    rows = [[visible_line(cell) for cell in row] for row in rows]  # names are foreign
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
