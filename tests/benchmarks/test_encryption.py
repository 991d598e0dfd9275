"""The table of what CURVE costs: a row a size."""

from __future__ import annotations

import pytest

from benchmarks import encryption


def test_a_row_for_each_size() -> None:
    clear = encryption.Round(mb_per_s=2000, trip_us=1234.5, cpu_s_per_gb=0.5)
    curve = encryption.Round(mb_per_s=500, trip_us=5000, cpu_s_per_gb=2.5)
    text = encryption.table([encryption.row(size, clear, curve) for size in (1024, 1 << 20)]).split(
        "\n"
    )
    assert [line.split()[1:3] for line in text[2:]] == [["1", "KiB"], ["1024", "KiB"]]
    assert text[2].split("|")[4:6] == ["     0.25 ", "  4.0 Gbit/s "]
    assert len({len(line) for line in text}) == 1


@pytest.mark.parametrize("words", [["--sizes", "0"], ["--sizes", "x"], ["--rounds", "many"]])
def test_mistakes_end_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        encryption.main(words)
    assert leaving.value.code == 2
