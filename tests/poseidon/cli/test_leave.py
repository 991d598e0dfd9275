"""`poseidon leave`: what it says where there is no such job."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cli.main import main


def test_there_is_no_such_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["leave", "net-1", "node3"]) == 1
    assert "'net-1' is neither a running job, nor a folder" in capsys.readouterr().err
    Path("output/net-1").mkdir(parents=True)
    for job in ("net-1", "output/net-1"):
        assert main(["leave", job, "node3"]) == 1
        said = capsys.readouterr().err
        assert f"no launcher of the job {job} runs on this machine; " in said
    assert main(["leave", "node3"]) == 1
    assert "no job is running" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["net-1", "node3", "node4"]])
def test_it_takes_a_host_and_a_job(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leave", *words]) == 2
    assert "expected a host that is to leave, or a job and a host" in capsys.readouterr().err
