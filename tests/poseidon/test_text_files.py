"""Texts as editors and systems write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.text_files import decoded, read_text

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
def test_every_form_of_a_text(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_text(tmp_path / "file") == decoded(content) == text


def test_half_a_character_of_utf_16() -> None:
    with pytest.raises(UnicodeDecodeError):
        decoded(b"\xff\xfea")
