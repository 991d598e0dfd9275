"""The table of codecs' processor time: a row for each codec, with both ways to compute."""

from __future__ import annotations

import re

import pytest

from benchmarks.codecs import main


@pytest.mark.needs("native")
def test_each_codec_has_a_row_with_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--codecs=int8,topk:0.1", "--workers=2", "--size=1000", "--rounds=2"])
    found = capsys.readouterr().out.splitlines()
    both = r"\d+\.\d{3} / \d+\.\d{3}"
    for codec in ("int8", "topk:0.1"):
        (row,) = [line for line in found if line.startswith(f"| `{codec}` |")]
        assert len(re.findall(both, row)) == 4
    assert [line.split()[1] for line in found if "float16" in line] == ["float16", "bfloat16"]
