"""The launcher of many simulated hosts: each thing that is measured happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import many_hosts


def test_a_job_of_simulated_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    found = many_hosts.measure(3, 2, tmp_path)
    assert set(found) == set(many_hosts.COLUMNS)
    assert all(figure >= 0 for figure in found.values())
