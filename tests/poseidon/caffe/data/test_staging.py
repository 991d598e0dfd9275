"""Nothing half-made: errors, kills, two at once, and a kill in the middle of the renames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from poseidon.caffe.data.staging import JOURNAL, Staging, recover, staging
from poseidon.errors import DataError


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def fill(stage: Staging, *names: str) -> None:
    for name in names:
        (stage.folder / name).mkdir()
        (stage.folder / name / "content").write_text(name)


def test_what_is_published_appears_and_the_rest_is_gone(tmp_path: Path) -> None:
    with staging(tmp_path / "thing") as stage:
        fill(stage, "a", "b", "rest")
        assert entries(tmp_path) == [".thing.partial"]
        stage.publish(["a", "b"])
    assert entries(tmp_path) == ["a", "b"]
    assert (tmp_path / "b" / "content").read_text() == "b"


def test_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "mean").write_text("old")
    with staging(tmp_path / "thing") as stage:
        (stage.folder / "mean").write_text("new")
        stage.publish(["mean"])
    assert (tmp_path / "mean").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staging(tmp_path / "new" / "deep" / "thing") as stage:
        fill(stage, "a")
        raise error
    assert entries(tmp_path) == []


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".thing.partial"
    (left / "a" / "deep").mkdir(parents=True)
    (left / "lock").touch()
    (left / "link").symlink_to(tmp_path)
    with staging(tmp_path / "thing") as stage:
        assert entries(stage.folder) == ["lock"]
    assert entries(tmp_path) == []


def test_renames_that_a_kill_cut_short_are_finished(tmp_path: Path) -> None:
    left = tmp_path / ".thing.partial"
    left.mkdir()
    fill(Staging(left), "b")
    fill(Staging(tmp_path), "a", "c")
    (left / JOURNAL).write_text(json.dumps({"remove": ["a", "c"], "move": ["a", "b"]}))
    recover(tmp_path / "thing")
    assert entries(tmp_path) == ["a", "b"]
    recover(tmp_path / "thing")


def _link(left: Path) -> None:
    left.symlink_to(left.parent / "mine")


def _of_another_user(left: Path) -> None:
    left.mkdir()
    os.chown(left, 4711, 4711)


def _journal(**order: object) -> Callable[[Path], None]:
    def leave(left: Path) -> None:
        left.mkdir()
        (left / JOURNAL).write_text(json.dumps(order))

    return leave


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (_link, r"\.thing\.partial is not a folder of this user; remove it"),
        pytest.param(
            _of_another_user,
            "is not a folder of this user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
        ),
        (lambda left: (left.mkdir(), (left / "lock").symlink_to(left.parent / "new")), "Too many"),
        (_journal(), "is damaged: remove"),
        (_journal(remove=["../mine"], move=[]), "is damaged: remove"),
        (_journal(remove=[""], move=[]), "is damaged: remove"),
        (_journal(remove=[], move=[".."]), "is damaged: remove"),
    ],
)
def test_what_is_left_by_others_is_refused(
    tmp_path: Path, leave: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "data"
    (folder / "mine").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    leave(folder / ".thing.partial")
    with pytest.raises(DataError, match=message):
        recover(folder / "thing")
    assert entries(folder) == [".thing.partial", "mine"] and entries(tmp_path) == ["data", "mine"]


def test_what_is_replaced_is_removed_first(tmp_path: Path) -> None:
    fill(Staging(tmp_path), "a", "old")
    (tmp_path / "file").touch()
    with staging(tmp_path / "thing") as stage:
        (stage.folder / "a").mkdir()
        stage.publish(["a"], remove=["a", "old", "file", "none"])
    assert entries(tmp_path) == ["a"]
    assert entries(tmp_path / "a") == []


def test_renames_that_fail_are_left_for_the_next_run(tmp_path: Path) -> None:
    fill(Staging(tmp_path), "b")
    with pytest.raises(OSError, match="b"), staging(tmp_path / "thing") as stage:
        fill(stage, "a", "b")
        stage.publish(["a", "b"])
    assert entries(tmp_path) == [".thing.partial", "a", "b"]
    (tmp_path / "b" / "content").unlink()
    with staging(tmp_path / "thing"):
        pass
    assert (tmp_path / "b" / "content").read_text() == "b"


def test_two_at_once_exclude_each_other(tmp_path: Path) -> None:
    with (
        staging(tmp_path / "thing") as stage,
        pytest.raises(DataError, match="thing is being created by another process"),
        staging(tmp_path / "thing"),
    ):
        pass
    assert not stage.folder.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from poseidon.caffe.data.staging import staging
with staging(Path(sys.argv[1])) as stage:
    (stage.folder / "half").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_a_killed_process_lets_go_of_its_lock(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "thing")], check=False, timeout=50)
    assert entries(tmp_path / ".thing.partial") == ["half", "lock"]
    with staging(tmp_path / "thing") as stage:
        assert entries(stage.folder) == ["lock"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc")):  # where a new file is "not found"
        with pytest.raises(DataError, match="cannot be created"), staging(folder / "thing"):
            pass
