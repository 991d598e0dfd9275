"""The simulator's command."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulate import main


@pytest.mark.parametrize("text", [None, "no tables"])
def test_tables_that_cannot_be_read_are_one_sentence(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    if text is not None:
        path.write_text(text)
    assert main(["beside", str(path)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert str(path) in said
