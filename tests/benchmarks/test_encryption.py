"""The table of what encryption costs: a row a size and kind."""

from __future__ import annotations

import pytest

from benchmarks import encryption


def test_a_row_for_each_size_and_kind() -> None:
    clear = encryption.Round(gbit_per_s=16, trip_us=1234.5, sender_s=0.1, receiver_s=0.2)
    found = {
        encryption.Kind.CLEAR: clear,
        encryption.Kind.SEALED: encryption.Round(
            gbit_per_s=4, trip_us=5000, sender_s=0.25, receiver_s=2.5
        ),
    }
    rows = [
        encryption.row(size, kind, each, clear)
        for size in (1024, 1 << 20)
        for kind, each in found.items()
    ]
    text = encryption.table(rows).split("\n")
    assert [line.split()[1] for line in text[2:]] == ["1", "1", "1024", "1024"]
    assert [cell.strip() for cell in text[3].split("|")[2:6]] == ["sealed", "4.0", "0.25", "5,000"]
    assert len({len(line) for line in text}) == 1


@pytest.mark.parametrize("words", [["--sizes", "0"], ["--sizes", "x"], ["--rounds", "many"]])
def test_mistakes_end_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        encryption.main(words)
    assert leaving.value.code == 2
