"""The examples of docs/pycaffe.md run, in order, in one folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.free_ports import free_port


def test_examples_run(
    repository: Path, tmp_path: Path, unbound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (repository / "docs" / "pycaffe.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    scope: dict[str, object] = {"__name__": "example"}
    for block in blocks:
        exec(block.replace("29511", str(free_port())), scope)
    assert (tmp_path / "model_iter_20.caffemodel").is_file()
    sys.modules.pop("scaling")
