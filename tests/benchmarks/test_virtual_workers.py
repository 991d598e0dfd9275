"""The benchmark of virtual workers trains, and compares what it is to compare."""

from __future__ import annotations

import re

import pytest

from benchmarks import virtual_workers as of
from benchmarks.virtual_workers import Case

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_bits_of_one_and_of_two_processes_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("small", True, 2, (1, 2), ["--exchange=svb"])
    trained = of.weights(case, 2, 1)
    assert re.fullmatch("[0-9a-f]{64}", trained)
    monkeypatch.setattr(of, "CASES", [case])
    monkeypatch.setattr(of, "weights", lambda case, processes, iterations: trained)
    assert of.bits(1, "small")
    expected = f"small                            V=2   1 2              {trained[:16]}\n"
    assert capsys.readouterr().out == expected
    monkeypatch.setattr(of, "weights", lambda case, processes, iterations: str(processes))
    assert not of.bits(1, "")
    assert "DIFFERENT {1: '1', 2: '2'}" in capsys.readouterr().out


def test_a_job_that_fails_ends_with_its_error() -> None:
    with pytest.raises(SystemExit, match="--no_such_flag"):
        of.weights(Case("none", False, 1, (1,), ["--no_such_flag"]), 1, 1)
