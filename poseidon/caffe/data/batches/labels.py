"""Labels in the text files of a user: lists of images, windows and annotations.

Law: a label is a whole number of 32 bits with a sign, as in a Datum.
"""

from __future__ import annotations

import re

from poseidon.errors import DataError

_INTEGER = re.compile(r"[+-]?[0-9]+")
LEAST, MOST = -(1 << 31), (1 << 31) - 1
_MOST_DIGITS = 4000  # Python converts no longer text


def is_integer(text: str) -> bool:
    """Return whether a text is a whole number of any size."""
    return _INTEGER.fullmatch(text) is not None


def read_label(text: str, where: str) -> int | None:
    """Return a text as a label; None if it is not a whole number.

    Args:
        text: of the label alone.
        where: file and line, for the error.

    Raises:
        DataError: it does not fit into 32 bits.
    """
    return checked_label(int(text[:_MOST_DIGITS]), where) if is_integer(text) else None


def checked_label(label: int, where: str) -> int:
    """Return a label that fits into 32 bits.

    Args:
        label: the number.
        where: file and line, for the error.

    Raises:
        DataError: it does not fit.
    """
    if not LEAST <= label <= MOST:
        raise DataError(f"{where}: the label {label} is out of range, expected {LEAST} to {MOST}")
    return label
