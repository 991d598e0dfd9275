"""Labels of text files: whole numbers of 32 bits."""

from __future__ import annotations

import pytest

from poseidon.caffe.data.batches.labels import LEAST, MOST, read_label
from poseidon.errors import DataError


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("0", 0),
        ("+7", 7),
        ("-1234567890", -1234567890),
        ("0000000000000012", 12),
        ("2147483647", MOST),
        ("-2147483648", LEAST),
        *[
            (text, None)
            for text in ("", "-", "+-5", "1.0", "1e3", "0x1", "x", " 1", "\u0663", "1_0")
        ],
    ],
)
def test_a_label(text: str, label: int | None) -> None:
    assert read_label(text, "list:3") == label


@pytest.mark.parametrize("text", ["2147483648", "-2147483649", "9" * 5000])
def test_a_label_that_does_not_fit(text: str) -> None:
    with pytest.raises(
        DataError, match=r"^list:3: the label -?\d.* is out of range, expected -2147483648 to 2"
    ):
        read_label(text, "list:3")
