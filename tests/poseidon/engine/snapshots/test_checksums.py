"""Checksums tell a whole snapshot from a damaged one, and leave files of other programs alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from poseidon.engine.snapshots.checksums import check, find_damage, seal, sealed_files, sums_path
from poseidon.errors import SnapshotError


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "snap_iter_5.solverstate"
    path.write_bytes(b"state" * 100)
    path.with_name("snap_iter_5.caffemodel").write_bytes(b"model" * 1000)
    seal(path, path.with_name("snap_iter_5.caffemodel"))
    return path


def test_what_was_written_is_whole(state: Path) -> None:
    assert find_damage(state) is None
    check(state)
    assert sealed_files(state) == (state.with_name("snap_iter_5.caffemodel"), state)


def test_the_sums_are_those_of_sha256sum(state: Path) -> None:
    words = ["sha256sum", "--check", "--strict", sums_path(state).name]
    assert subprocess.run(words, cwd=state.parent, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["snap_iter_5.solverstate", "snap_iter_5.caffemodel"])
def test_every_cut_and_every_changed_byte_is_seen(state: Path, name: str) -> None:
    path = state.with_name(name)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:1] + b"!" + whole[2:], whole + b"\0"):
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=f"{name} is truncated or changed"):
            check(state)
    path.unlink()
    with pytest.raises(SnapshotError, match=f"cannot read .*{name}"):
        check(state)


def test_a_snapshot_without_sums_is_taken_as_it_is(state: Path) -> None:
    sums_path(state).unlink()
    state.write_bytes(b"of Caffe")
    assert find_damage(state) is None
    assert sealed_files(state) is None


@pytest.mark.parametrize(
    "text",
    ["", "\xff", "nonsense\n", f"{'0' * 64}  ../snap_iter_5.solverstate\n", f"{'0' * 64}  other\n"],
)
def test_damaged_checksums_are_reported(state: Path, text: str) -> None:
    sums_path(state).write_bytes(text.encode("latin-1"))
    with pytest.raises(
        SnapshotError, match=r"snap_iter_5.solverstate.sha256 is damaged: resume from an earlier"
    ):
        check(state)
    assert sealed_files(state) is None
