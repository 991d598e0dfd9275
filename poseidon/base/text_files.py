"""Text that other programs and people have written, and text of theirs that Poseidon writes.

Law: no text is refused for its encoding. What is not UTF-8, such as a file name in Latin-1, is kept
as surrogates (`surrogateescape`), as in the names of Python's own functions for files; in a log or
a message a surrogate is written as an escape (`backslashreplace`).

The lines of a stream of output that comes in pieces, and text that a terminal only shows.

Law: pure. A carriage return goes back to the beginning of its line, as on a terminal: of a progress
bar the last state remains. What Poseidon composes goes through `visible` where it is written:
names of layers, files, tensors and hosts are foreign, and a terminal obeys what is in them. What a
user's script writes is not touched.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

_UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def decoded(content: bytes, *, errors: str = "surrogateescape") -> str:
    """Return the text of a file, UTF-8 with or without a byte order mark, or UTF-16 with one, as
    Windows writes it.

    Lines end in a line feed.

    Args:
        errors: what becomes of bytes that are not UTF-8; see `codecs`.

    Raises:
        UnicodeDecodeError: the content has the mark of UTF-16, but is not UTF-16.
    """
    encoding = _UTF_16.get(content[:2])
    if encoding is not None:
        text = content[2:].decode(encoding)
    else:
        text = content.decode("utf-8-sig", errors=errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def escaped(text: str) -> str:
    """Return a text that is UTF-8: surrogates are escapes, as `caf\\udce9.jpg`.

    >>> escaped("caf\\udce9.jpg")
    'caf\\\\udce9.jpg'
    """
    return text.encode(errors="backslashreplace").decode()


def text_of(content: bytes) -> str | None:
    """Return the text of a file; see `decoded`. None: the file is binary."""
    try:
        text = decoded(content)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


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
_BYTES = re.compile("[\udc80-\udcff]+")
_BESIDE_LAYOUT = {code: text for code, text in _AS_ESCAPES.items() if chr(code) != "\n"}


def visible(text: str) -> str:
    r"""Return a text in which control characters are escapes, but not line ends and tabs. Names of
    files that are UTF-8 are so, also if Python has read them in a locale without it.

    >>> visible("conv\x1b[2J1")
    'conv\\x1b[2J1'
    >>> visible("caf\udcc3\udca9")
    'café'
    """
    return text if text.isprintable() else joined(text).translate(_BESIDE_LAYOUT)


def visible_line(text: str) -> str:
    """Return a text as one line: `visible`, and its line ends are escapes as well."""
    return text if text.isprintable() else joined(text).translate(_AS_ESCAPES)


def joined(text: str) -> str:
    """Return a text in which surrogates that stand for bytes of UTF-8 are its characters."""
    return _BYTES.sub(
        lambda found: found[0].encode("ascii", "surrogateescape").decode(errors="surrogateescape"),
        text,
    )


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
