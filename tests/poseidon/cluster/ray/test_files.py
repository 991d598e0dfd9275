"""Files of a node, read and written by the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.ray import files
from poseidon.cluster.ray.files import NodeFiles
from poseidon.cluster.ray.node_actor import file_operation


def _operate(header: Mapping[str, object], payload: bytes) -> tuple[dict[str, Any], bytes]:
    return file_operation(dict(header), payload)


def test_a_file_is_written_in_pieces_and_appended_to(tmp_path: Path) -> None:
    session, path = NodeFiles(_operate), tmp_path / "weights"
    path.write_bytes(b"of another job")
    for mode, pieces in (("wb", [b"one ", b"two "]), ("ab", [b"three"])):
        target = session.open(str(path), mode)
        for piece in pieces:
            target.write(piece)
        target.close()
    assert path.read_bytes() == b"one two three"
    assert session.stat(str(path)).st_size == 13
    assert session.stat(str(path)).st_mode == path.stat().st_mode


@pytest.mark.parametrize("size", [0, 1, 10, 11])
def test_a_file_is_brought_block_by_block(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 5)
    (tmp_path / "there").write_bytes(bytes(range(size)))
    session = NodeFiles(_operate)
    session.get(str(tmp_path / "there"), str(tmp_path / "here"))
    assert (tmp_path / "here").read_bytes() == bytes(range(size))


@pytest.mark.parametrize("mode", ["rb", "ab", "wb"])
def test_a_file_that_cannot_be_opened(tmp_path: Path, mode: str) -> None:
    with pytest.raises(FileNotFoundError):
        NodeFiles(_operate).open(str(tmp_path / "missing" / "file"), mode)
