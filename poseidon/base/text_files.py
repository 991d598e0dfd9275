"""Text that other programs and people have written, and text of theirs that Poseidon writes.

Law: no text is refused for its encoding. What is not UTF-8, such as a file name in Latin-1, is kept
as surrogates (`surrogateescape`), as in the names of Python's own functions for files; in a log or
a message a surrogate is written as an escape (`backslashreplace`).
"""

from __future__ import annotations

import codecs

_UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def decoded(content: bytes, *, errors: str = "surrogateescape") -> str:
    """Return the text of a file, UTF-8 with or without a byte order mark, or UTF-16 with one, as
    Windows writes it.

    Lines end in a line feed.

    Args:
        content: of the file.
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
