"""Errors become one sentence and an exit code."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from poseidon.cli import ps
from poseidon.cli.main import main


class FullDisk(io.StringIO):
    """Standard output on a disk that is full: noticed only when the buffer is emptied."""

    def flush(self) -> None:
        """Refuse."""
        raise OSError(errno.ENOSPC, "No space left on device")


def test_output_on_a_full_disk_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdout", FullDisk())
    assert main(["ps"]) == 1
    assert capsys.readouterr().err == "poseidon ps: No space left on device\n"


def test_a_file_that_nobody_foresaw_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/etc/secret")

    monkeypatch.setattr(ps, "run", fail)
    assert main(["ps"]) == 1
    assert capsys.readouterr().err == "poseidon ps: /etc/secret: Permission denied\n"


def test_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdout", None)
    assert main(["ps"]) == 0


@pytest.mark.parametrize(
    "words, says",
    [
        (
            "ps --hostfil=x",
            "poseidon ps: unknown flag --hostfil, did you mean --hostfile?; see poseidon ps --help",
        ),
        ("ps --nosuch", "poseidon ps: unknown flag --nosuch; see poseidon ps --help"),
        ("ps more words", "poseidon ps: did not expect 'more words'; see poseidon ps --help"),
        ("ps --hostfile", "poseidon ps: argument --hostfile: expected one argument; see poseidon ps --help"),
        ("-x ps", "poseidon ps: unknown flag -x; see poseidon ps --help"),
    ],
)
def test_wrong_words_are_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert capsys.readouterr().err == says + "\n"


def test_ctrl_c_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("poseidon.cli.main.import_module", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "poseidon: interrupted\n"
