"""The simulator's command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.simulate import main
from tests.support.host_costs import COSTS


@pytest.mark.parametrize("text", [None, "no tables"])
def test_tables_that_cannot_be_read_are_one_sentence(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    if text is not None:
        path.write_text(text)
    assert main(["compare", str(path)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert str(path) in said


def test_measured_jobs_are_compared_with_what_plan_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = replace(COSTS, cores=2, free_cores=2.0)
    monkeypatch.setattr(simulate, "planned_costs", lambda hosts: costs)
    title = "googlenet, batch 32, 2 hosts, compute 50 ms, 250 Mbit/s"
    facts = [
        {"job": job, "rate_mbit": 250.0, "compute_s": 0.05, "median_s": 1.0}
        for job in ("ps", "DDP", "DDP fp16")
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps([{"title": title, "facts": facts}]))
    assert main(["compare", str(path), "--plan"]) == 0
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("googlenet,")
    ]
    ps, ddp, fp16 = (float(row[-4]) for row in rows)
    assert fp16 < ddp
    assert ps > 0.05
