"""Jobs of a table take turns, those of another checkout too."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import scale


def test_jobs_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[str] = []

    def measure(
        net: str, job: scale.Job, steps: int, checkout: Path, hosts: Sequence[object]
    ) -> tuple[float, float]:
        assert not hosts
        turns.append(f"{job.name} {checkout.name}")
        return (len(turns), 2.0 if job.clients else 1.0)

    monkeypatch.setattr(scale, "measure", measure)
    monkeypatch.setattr(scale, "alone", nullcontext)
    monkeypatch.setattr(scale, "ROOT", Path("/now"))
    scale.main(["hosts", "--nets=mlp", "--rounds=2", "--beside=/before"])
    assert turns == ["DDP now", "ps now", "ps before"] * 2
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.split()[4] for row in rows] == ["DDP", "ps", "ps"]
    assert rows[1].split()[:4] == ["mlp", "8", "2", "12"]
    assert rows[2].split()[-2:] == ["0.56", "0.50"]
