"""What a job prints at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from poseidon.launch.final_report import (
    aligned,
    model_of,
    resume_command,
    short_path,
    test_commands,
    without_flags,
)
from poseidon.proto.definition import read_solver
from tests.support.training import write_definitions


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train", "--job=x", "-solver", "a", "--background"], ["train", "-solver", "a"]),
        (["train", "-job", "x", "--background", "--solver=a"], ["train", "--solver=a"]),
        (["train", "--jobs=x", "job"], ["train", "--jobs=x", "job"]),
        (["train", "--job"], ["train"]),
        (["train", "--net-outputs=x", "--background=true"], ["train"]),
    ],
)
def test_flags_are_left_out_in_every_form(words: list[str], kept: list[str]) -> None:
    assert without_flags(words, ["job", "background", "net_outputs"], bare=["background"]) == kept


def test_the_command_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "--solver=my solver",
        "--snapshot=old",
        "--weights",
        "w",
        "--output=o",
        "--net_outputs=o/x",
        "--gpu=0",
    ]
    command = resume_command(words, tmp_path / "snaps" / "x_iter_5.solverstate")
    assert shlex.split(command) == [
        "poseidon",
        "train",
        "--solver=my solver",
        "--gpu=0",
        "--snapshot=snaps/x_iter_5.solverstate",
    ]
    assert short_path(Path("/elsewhere/x")) == "/elsewhere/x"


def test_the_command_that_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extra = 'test_iter: 7\ntest_state: { stage: "a" stage: "b" level: 2 }'
    solver = read_solver(write_definitions(tmp_path, batch=4, extra=extra))
    model = model_of(tmp_path / "snap_iter_3.solverstate.h5")
    assert test_commands(solver, model) == [
        "poseidon test -model net.prototxt -weights snap_iter_3.caffemodel.h5 -iterations 7 -level 2 -stage a,b"
    ]
    del solver.param.test_iter[:]
    del solver.param.test_state[:]
    assert test_commands(solver, model) == []


def test_entries_stand_below_each_other() -> None:
    assert aligned([("model", "a"), ("resume", "b"), ("x", "c")]) == [
        "  model:   a",
        "  resume:  b",
        "  x:       c",
    ]
