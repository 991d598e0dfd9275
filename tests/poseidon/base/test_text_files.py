"""Texts as editors and systems write them."""

from __future__ import annotations

import pytest

from poseidon.base.text_files import (
    LONGEST_LINE,
    LineAssembler,
    OutputLine,
    aligned,
    decoded,
    text_of,
    visible,
    visible_line,
)

TEXT = "café 1\nb 2\n"
MARK = "\ufeff"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (TEXT.encode(), TEXT),
        ((MARK + TEXT).encode(), TEXT),
        ((MARK + TEXT).encode("utf-16-le"), TEXT),
        ((MARK + TEXT).encode("utf-16-be"), TEXT),
        (TEXT.replace("\n", "\r\n").encode(), TEXT),
        (TEXT.replace("\n", "\r").encode(), TEXT),
        (TEXT.encode("latin-1"), "caf\udce9 1\nb 2\n"),
        (b"", ""),
    ],
)
def test_every_form_of_a_text(content: bytes, text: str) -> None:
    assert text_of(content) == decoded(content) == text


def test_half_a_character_of_utf_16() -> None:
    with pytest.raises(UnicodeDecodeError):
        decoded(b"\xff\xfea")


@pytest.mark.parametrize("content", [b"\xff\xfea", b"\x7fELF\x02\0", b"a\0"])
def test_a_binary_file_has_no_text(content: bytes) -> None:
    assert text_of(content) is None


BAR = "\r  0%|  |\r 50%|# |\r100%|##|\n"


def lines(pieces: list[str]) -> list[OutputLine]:
    assembler = LineAssembler()
    return [line for piece in pieces for line in assembler.feed(piece)] + assembler.finish()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\n", [("a", False), ("b", False)]),
        ("a\n\nrest", [("a", False), ("", False), ("rest", False)]),
        ("windows\r\n", [("windows", False)]),
        ("windows\r\r\n", [("windows", False)]),
        (BAR + "next\n", [("100%|##|", True), ("next", False)]),
        ("\ronce\n", [("once", False)]),
        ("\r 50%|# |\r        \rdone\n", [("done", True)]),
        ("\r 50%|# |\r", [(" 50%|# |", False)]),
        ("  \n", [("  ", False)]),
        ("  ", []),
    ],
)
def test_lines_do_not_depend_on_the_pieces(text: str, expected: list[tuple[str, bool]]) -> None:
    for size in (1, 2, 5, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert [(line.text, line.redrawn) for line in lines(pieces)] == expected


def test_a_bar_that_never_ends_takes_no_memory() -> None:
    assembler = LineAssembler()
    for step in range(1000):
        assert assembler.feed(f"\r{step:0>1000}") == []
    assert len(assembler._pending) <= 1001
    assert assembler.feed("\n") == [OutputLine(text=f"{999:0>1000}", redrawn=True)]


def test_a_line_that_never_ends_is_cut() -> None:
    found = lines(["x" * (LONGEST_LINE + 1), "x" * LONGEST_LINE, "y"])
    assert [len(line.text) for line in found] == [LONGEST_LINE, LONGEST_LINE, 2]


HOSTILE = (
    "\x1b[2J",
    "a\rb",
    "\x9b31m",
    "\x7f",
    "\x08",
    "\u202egnp.exe",
    "\u200b",
    "\u2028",
    "\x00",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_terminal_obeys_is_an_escape(text: str) -> None:
    for shown in (visible(text), visible_line(text)):
        assert shown.isprintable() and "\\" in shown
        assert visible_line(shown) == shown


def test_text_and_its_layout_stay() -> None:
    for text in ("conv1\t0.5\n", "caf\xe9 \u6f22\u5b57 \U0001f600", "a\\nb", ""):
        assert visible(text) == text
    assert visible_line("a\nI0101 forged\t") == "a\\nI0101 forged\t"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("JOB", "N"), ("a-long-one", "12"), ("b", "")]
    assert aligned(rows) == ["JOB         N", "a-long-one  12", "b"]
    assert aligned(rows, left=1) == ["JOB          N", "a-long-one  12", "b"]
