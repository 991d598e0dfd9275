"""A file that is put in place is on disk before it has its name, and its name is on disk after
that.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from poseidon.durable import obstacle_to, replace_durably
from tests.support.flushes import Flush, watch_flushes


def test_content_first_then_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, path = tmp_path / "partial", tmp_path / "file"
    partial.write_bytes(b"new")
    path.write_bytes(b"old")
    seen = watch_flushes(monkeypatch)
    replace_durably(partial, path)
    assert path.read_bytes() == b"new"
    assert seen == [
        Flush(path=partial, holds=None),
        Flush(path=tmp_path, holds=frozenset({"file"})),
    ]


def test_what_is_not_there_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        replace_durably(tmp_path / "partial", path)
    assert path.read_bytes() == b"old"


def test_obstacles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert obstacle_to(tmp_path) is None
    assert obstacle_to(tmp_path / "new" / "deep") is None
    assert obstacle_to(tmp_path / "file" / "deep") == f"{tmp_path}/file is not a folder"
    assert obstacle_to(tmp_path / "nowhere") == f"{tmp_path}/nowhere is not a folder"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=9, free=0))
    assert obstacle_to(tmp_path / "new") == f"the disk of {tmp_path} is full"
    assert list(tmp_path.glob("new")) == []
