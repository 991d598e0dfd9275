"""The lines of a stream of output that comes in pieces, and text that a terminal only shows.

Law: pure. A carriage return goes back to the beginning of its line, as on a terminal: of a progress
bar the last state remains. What Poseidon composes goes through `visible` where it is written:
names of layers, files, tensors and hosts are foreign, and a terminal obeys what is in them. What a
user's script writes is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_LINE = 1 << 20
"""A longer line is cut: a process that writes without line ends must not fill our memory."""


_OBEYED = (
    *(*range(0x20), *range(0x7F, 0xA0)),  # C0, DEL, C1
    *(0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF),
)
"""Characters that move, hide or turn round what is shown; the last line has those of Unicode."""
_AS_ESCAPES = {
    code: chr(code).encode("unicode_escape").decode("ascii")
    for code in _OBEYED
    if chr(code) != "\t"
}
_BESIDE_LAYOUT = {code: text for code, text in _AS_ESCAPES.items() if chr(code) != "\n"}


def visible(text: str) -> str:
    r"""Return a text in which control characters are escapes, but not line ends and tabs.

    >>> visible("conv\x1b[2J1")
    'conv\\x1b[2J1'
    """
    return text if text.isprintable() else text.translate(_BESIDE_LAYOUT)


def visible_line(text: str) -> str:
    """Return a text as one line: `visible`, and its line ends are escapes as well."""
    return text if text.isprintable() else text.translate(_AS_ESCAPES)


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
