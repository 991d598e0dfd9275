"""The lines of a stream of output that comes in pieces.

Law: pure. A carriage return goes back to the beginning of its line, as on a terminal: of a progress
bar the last state remains.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_LINE = 1 << 20
"""A longer line is cut: a process that writes without line ends must not fill our memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """A line without its end.

    Attributes:
        text: what is left of it.
        redrawn: whether something in it was overwritten, as by a progress bar.
    """

    text: str
    redrawn: bool = False


class LineAssembler:
    """Makes lines of pieces of output."""

    def __init__(self) -> None:
        self._pending = ""
        self._redrawn = False

    def feed(self, piece: str) -> list[OutputLine]:
        """Add a piece; return the lines that it completes."""
        *whole, rest = (self._pending + piece).split("\n")
        lines = [self._line(part) for part in whole]
        drawn, overwritten = _last_state(rest)
        self._redrawn = self._redrawn or overwritten
        # The return that a line ends in may be half of its end.
        self._pending = drawn + "\r" if rest.endswith("\r") else drawn
        while len(self._pending) > LONGEST_LINE:
            cut, self._pending = self._pending[:LONGEST_LINE], self._pending[LONGEST_LINE:]
            lines.append(self._line(cut))
        return lines

    def finish(self) -> list[OutputLine]:
        """Return the line that has no end, if there is one."""
        rest, self._pending = self._pending, ""
        return [self._line(rest)] if rest.strip() else []

    def _line(self, part: str) -> OutputLine:
        text, overwritten = _last_state(part)
        line = OutputLine(text=text, redrawn=self._redrawn or overwritten)
        self._redrawn = False
        return line


def _last_state(text: str) -> tuple[str, bool]:
    """Return what is left of a line, and whether it was drawn more than once."""
    before, returned, last = text.rstrip("\r").rpartition("\r")
    return last, bool(returned and before.strip("\r"))
