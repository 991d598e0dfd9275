"""`poseidon train`, as far as it goes without starting a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from poseidon.cli.main import main
from tests.support.training import write_definitions


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return write_definitions(tmp_path, batch=4, extra="max_iter: 3\nsolver_mode: CPU")


@pytest.mark.parametrize("flag", ["--background", "-background"])
def test_the_background_gets_the_words_that_main_was_given(
    flag: str,
    solver: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that calls `main` has words of its own in sys.argv."""
    started: list[Sequence[str]] = []

    def start(argv: Sequence[str], log: Path, *, timeout_s: float) -> int:
        started.append(argv)
        return 123

    monkeypatch.setattr("poseidon.cli.train.run_in_background", start)
    monkeypatch.setattr(sys, "argv", ["train_cifar10.py", "--clients", "2"])
    words = ["train", f"--solver={solver}", "--table_staleness=1"]
    assert main([*words, flag, "--output=logs"]) == 0
    (argv,) = started
    assert list(argv[:3]) == [sys.executable, "-m", "poseidon"]
    assert list(argv[3:6]) == words
    assert flag not in argv
    assert argv[-1] == f"--output={tmp_path}/logs"
    assert "launcher pid 123" in capsys.readouterr().out


def test_a_flag_may_not_be_cut_short(solver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or the background launcher, which is told all words but --background, would go there again and again."""
    with pytest.raises(SystemExit) as ended:
        main(["train", f"--solver={solver}", "--backgr"])
    assert ended.value.code == 2
    assert "--backgr" in capsys.readouterr().err
