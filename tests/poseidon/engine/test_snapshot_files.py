"""Snapshot files appear whole or not at all."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path

import pytest

from poseidon.engine.snapshot_files import (
    SnapshotWriter,
    check,
    find_damage,
    make_folder,
    seal,
    sealed_files,
    sums_path,
    write_atomically,
)
from poseidon.errors import SnapshotError


def test_a_write_that_fails_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    write_atomically(path, b"first")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SnapshotError, match=r"cannot write .*model: No space left on device"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_read_only_file_system_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even removing what is not there is refused."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("os.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SnapshotError, match=r"cannot write .*model: Read-only file system"):
        write_atomically(tmp_path / "model", b"x")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="No such file or directory"):
        write_atomically(tmp_path / "no" / "model", b"")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"cannot create the folder .*file"):
        make_folder(tmp_path / "file" / "b")


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


@pytest.mark.parametrize("prefix", ["a b", "a\rb", "a\vb", "a\x85b", "a\u2028b", "a\\b", "a\udcff"])
def test_any_name_of_one_line_is_read_as_it_was_written(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / f"{prefix}_iter_5.solverstate"
    path.write_bytes(b"state")
    seal(path)
    assert find_damage(path) is None and sealed_files(path) == (path,)


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
    os.mkfifo(path)
    with pytest.raises(SnapshotError, match=f"{name}: it is not a regular file"):
        check(state)


def test_a_pipe_in_place_of_checksums_is_damage(state: Path) -> None:
    sums_path(state).unlink()
    os.mkfifo(sums_path(state))
    assert "is damaged" in (find_damage(state) or "")


def test_checksums_of_any_size_are_damage(state: Path) -> None:
    os.truncate(sums_path(state), 1 << 43)  # a hole
    assert "is damaged" in (find_damage(state) or "")


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
    with pytest.raises(SnapshotError, match=r"snap_iter_5.solverstate.sha256 is damaged"):
        check(state)
    assert sealed_files(state) is None


def fail() -> None:
    raise SnapshotError("the disk is full")


def test_submit_returns_while_the_write_is_under_way() -> None:
    writer, go, written = SnapshotWriter(), threading.Event(), list[int]()

    def write() -> None:
        assert go.wait(30)
        written.append(1)

    writer.submit(write)
    assert written == []
    go.set()
    writer.wait()
    assert written == [1]


def test_writes_keep_their_order() -> None:
    writer, written = SnapshotWriter(), list[int]()
    for number in range(20):
        writer.submit(lambda number=number: written.append(number))
    writer.wait()
    assert written == list(range(20))


def test_the_last_failure_is_raised_once_and_each_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = SnapshotWriter()
    with caplog.at_level(logging.WARNING):
        writer.submit(fail)
        with pytest.raises(SnapshotError, match="the disk is full"):
            writer.wait()
    assert "the disk is full; training continues" in caplog.text
    writer.wait()


def test_the_warning_of_a_runs_last_write_says_that_the_job_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = SnapshotWriter()
    writer.submit(fail, last=True)
    with pytest.raises(SnapshotError, match="the disk is full"):
        writer.wait()
    assert "the disk is full; it is the run's last, so the job fails" in caplog.text
    assert "training continues" not in caplog.text


def test_a_later_success_clears_an_earlier_failure() -> None:
    writer = SnapshotWriter()
    writer.submit(fail)
    writer.submit(lambda: None)
    writer.wait()


def test_an_unexpected_exception_is_an_error() -> None:
    writer = SnapshotWriter()
    writer.submit(lambda: print(1 / 0))
    with pytest.raises(SnapshotError, match="could not be written: ZeroDivisionError"):
        writer.wait()
