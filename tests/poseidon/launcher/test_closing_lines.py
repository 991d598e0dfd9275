"""The last lines of a job: commands that do something as they are pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from poseidon.launcher.closing_lines import aligned, resume_command, without_flags


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train", "--job=x", "-solver", "a", "--background"], ["train", "-solver", "a"]),
        (["train", "-job", "x", "--background", "--solver=a"], ["train", "--solver=a"]),
        (["train", "--jobs=x", "job"], ["train", "--jobs=x", "job"]),
        (["train", "--job"], ["train"]),
        (["train", "--net-outputs=x", "--background=true"], ["train"]),
        (["train", "--background", "True", "--solver", "a"], ["train", "--solver", "a"]),
    ],
)
def test_flags_are_left_out_in_every_form(words: list[str], kept: list[str]) -> None:
    assert without_flags(words, ["job", "background", "net_outputs"]) == kept


@pytest.mark.parametrize(
    ("words", "changes", "expected"),
    [
        (
            "--solver='my solver' --snapshot=old --weights w --output=o --gpu=0",
            {"snapshot": "snaps/x_iter_5.solverstate"},
            "--solver='my solver' --gpu=0 --snapshot=snaps/x_iter_5.solverstate",
        ),
        (
            "--max_iter=5 --net_outputs=o/x --set max_iter=7 --set=base_lr=1",
            {"snapshot": "job-1", "max_iter": "10"},
            "--set=base_lr=1 --snapshot=job-1 --max_iter=10",
        ),
        (
            "--set display=2 -set max_iter=7 -max_iter 3 --set",
            {"max_iter": "10"},
            "--set display=2 --set '' --max_iter=10",
        ),
        (
            "--solver={}/s -hostfile {}/../near --other=/usr/none --tensorboard_dir=/usr",
            {"snapshot": "job-1"},
            "--solver=s -hostfile ../near --other=/usr/none --tensorboard_dir=/usr --snapshot=job-1",
        ),
        (
            "--solver=s --set snapshot=8 --set=max_iter=9 --snapshot=job-0",
            {"snapshot": "job-1", "max_iter": "20"},
            "--solver=s --set snapshot=8 --snapshot=job-1 --max_iter=20",
        ),
    ],
)
def test_the_command_that_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    changes: dict[str, str],
    expected: str,
) -> None:
    """Values of the job that has run give way; absolute paths become short where they name
    something.
    """
    here = tmp_path / "here"
    here.mkdir()
    (here / "s").write_text("")
    (tmp_path / "near").write_text("")
    monkeypatch.chdir(here)
    command = resume_command(["train", *shlex.split(words.format(here, here))], changes)
    assert shlex.split(command) == ["poseidon", "train", *shlex.split(expected)]


def test_entries_stand_below_each_other() -> None:
    assert aligned([("model", "a"), ("resume", "b"), ("x", "c")]) == [
        "  model:   a",
        "  resume:  b",
        "  x:       c",
    ]
