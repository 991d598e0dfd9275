"""`poseidon worker`: flags, key and environment, before anybody is met."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from poseidon.cli.worker import add_parser
from poseidon.errors import UsageError

KEY = "k" * 64


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["worker", *words])
    return int(arguments.run(arguments))


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    return f"--key_file={path}"


def test_a_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--new_key={tmp_path}/new") == 0
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out.startswith(f"{tmp_path}/new: a new key.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the job is missing: expected 'train' or 'run'"),
        (["stats"], "the job is missing"),
        (["train", "--solver=s", "--hostfile=f"], "--hostfile has no place here"),
        (["--", "train", "--solver=s", "--background"], "--background has no place here"),
        (["--meeting_timeout=0", "run", "script.py"], "--meeting_timeout=0: expected more than 0 seconds"),
        (["run", "script.py", "--hostfile=the_scripts_own"], "no RANK and WORLD_SIZE"),
    ],
)
def test_words_that_make_no_sense(
    key: str, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr("poseidon.cli.worker.inherited_environment", dict)
    with pytest.raises(UsageError, match=message):
        run(key, *words)


def test_no_key() -> None:
    with pytest.raises(
        UsageError, match="--key_file is missing: make one with 'poseidon worker --new_key=FILE'"
    ):
        run("train", "--solver=s")


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_ports_that_are_none(key: str, port: str) -> None:
    with pytest.raises(SystemExit):
        run(key, f"--rendezvous_port={port}", "train", "--solver=s")
