"""`poseidon leave`: what it says where there is no such job."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cli.main import main


def test_there_is_no_such_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    assert main(["leave", "net-1", "node3"]) == 1
    said = capsys.readouterr().err
    assert "no launcher of a job net-1 runs on this machine; " in said
