"""Texts as editors and systems write them."""

from __future__ import annotations

import pytest

from poseidon.base.text_files import decoded, text_of

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
